"""A switch between hosts, in a process of its own: it delays, drops and stops frames as it is told, line by line.

It is in user space, since not every kernel can spoil a network itself (`netem`). Each host's end is a TAP device,
which is made here and moved to the host. A command is a line of JSON, and so is its answer.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME_BYTES = 65536
MAC = "02:00:00:00:00:{:02x}"
MAC_BYTES = 6
"""The last of them is the host's number; a destination that is no host's is for all."""


@dataclass(slots=True)
class Cable:
    """Between a host and the switch."""

    tap: int
    """A descriptor."""
    delay_s: float = 0.0
    drop: float = 0.0
    """Share of the frames, each way."""
    up: bool = True


class Switch:
    def __init__(self) -> None:
        self._cables: dict[int, Cable] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        """Frames on their way: when they arrive, their number, where to, and what."""
        self._frames = 0
        self._chance = random.Random(0)

    def plug(self, host: int, pid: int) -> None:
        """A new cable to a host whose first process this is."""
        if old := self._cables.pop(host, None):
            os.close(old.tap)
        tap, name = os.open("/dev/net/tun", os.O_RDWR), f"to{host}"
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        os.set_blocking(tap, False)
        for command in (["address", MAC.format(host)], ["netns", str(pid), "name", "eth0"]):
            subprocess.run(["ip", "link", "set", name, *command], check=True)
        self._cables[host] = Cable(tap=tap)

    def spoil(self, host: int, **how: Any) -> None:
        for name, value in how.items():
            setattr(self._cables[host], name, value)

    def run(self) -> None:
        """Until nobody gives commands any more."""
        while True:
            taps = {cable.tap: host for host, cable in self._cables.items()}
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            ready, _, _ = select.select([sys.stdin.fileno(), *taps], [], [], wait_s)
            for descriptor in ready:
                if descriptor in taps:
                    self._receive(taps[descriptor])
                elif not self._obey():
                    return
            self._deliver()

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if line:
            command = json.loads(line)
            getattr(self, command.pop("do"))(**command)
            print("{}", flush=True)
        return bool(line)

    def _receive(self, host: int) -> None:
        cable = self._cables.get(host)
        try:
            frame = os.read(cable.tap, FRAME_BYTES) if cable else b""
        except BlockingIOError:
            return
        except OSError:  # that host is gone
            os.close(self._cables.pop(host).tap)
            return
        to = frame[MAC_BYTES - 1] if frame else 0
        for other in [to] if to in self._cables else self._cables.keys() - {host}:
            self._send(frame, (self._cables[host], self._cables[other]), other)

    def _send(self, frame: bytes, way: tuple[Cable, Cable], to: int) -> None:
        if all(cable.up and self._chance.random() >= cable.drop for cable in way):
            self._frames += 1
            heapq.heappush(self._late, (time.monotonic() + sum(each.delay_s for each in way), self._frames, to, frame))

    def _deliver(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(self._late)
            try:
                os.write(self._cables[to].tap, frame)
            except (OSError, KeyError):  # that host is gone, or has no room: then the frame is lost
                continue


if __name__ == "__main__":
    Switch().run()
