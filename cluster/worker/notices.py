"""Hears that this machine will be taken away: from a signal, a file, or a cloud's metadata service.

A source never raises for what a service answers: one that is unreachable, broken or talks
nonsense gives no notice, is logged once, and is asked again. What to do on a notice is decided
elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPMessage, HTTPResponse
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from spotlight.clock import on_wall_clock, wall_clock
from spotlight.records import record

GRACE_S = 30.0
"""What a preempted GCP machine is given, and Azure at least; SpotServe assumes it too."""
POLL_S = 2.0
"""AWS suggests 5 s of its 120 s; Azure and GCP leave 30 s, of which this costs little."""
LINK_LOCAL = "http://169.254.169.254"
"""Where AWS, GCP and Azure all serve a machine its own metadata."""
ANSWER_S = 5.0
"""A metadata service is on the same host; one that takes longer is asked again."""
ANSWER_BYTES = 2**20
"""An answer has a few hundred; Azure's has some for each event of a scale set."""
WAIT_S = 30.0
"""How long GCP's service is asked to hold a question open while nothing changes."""
TOKEN_LIFE_S = 6 * 3600
"""The longest that AWS grants."""
AZURE_EVENTS_VERSION = "2020-07-01"
AZURE_INSTANCE_VERSION = "2021-02-01"

logger = logging.getLogger("spotlight.notices")


@record
class Notice:
    """This machine, or this process, will be taken away."""

    source: str
    """The name in the settings: ``sigterm``, ``sigusr1``, ``file``, ``aws``, ``gcp`` or ``azure``."""
    reason: str
    """For the log: what the source said."""
    deadline_s: float
    """Unix seconds by which the machine is gone; may be past."""


class Source(Protocol):
    """Where a notice comes from."""

    async def notice(self) -> Notice:
        """Wait for the notice, for ever if none comes; may be cancelled at any time."""


def sources(names: Sequence[str], *, grace_s: float = GRACE_S, poll_s: float = POLL_S) -> list[Source]:
    """The sources that settings name.

    Args:
        names: ``sigterm``, ``sigusr1``, ``file:PATH``, or ``aws``, ``gcp``, ``azure``, each of these three also
            with the base URL of its metadata service, as in ``aws:http://127.0.0.1:1234``.
        grace_s: seconds left from the moment of a notice that names no deadline itself.
        poll_s: seconds between two looks at a file or a metadata service.

    Raises:
        ValueError: it is no name that settings take.
    """
    return [_source(name, grace_s, poll_s) for name in names]


async def first_notice(sources: Sequence[Source]) -> Notice:
    """Wait for the first notice of any source; of several at once, the one with the least time left.

    Without sources there is never a notice. Signal handlers stay until the event loop closes: a machine that
    goes sends the same signal again, which may not kill a worker that is about to leave in order.
    """
    if not sources:
        await asyncio.get_running_loop().create_future()
    listening = [asyncio.create_task(source.notice()) for source in sources]
    try:
        done, _ = await asyncio.wait(listening, return_when=asyncio.FIRST_COMPLETED)
        return min((task.result() for task in done), key=lambda notice: notice.deadline_s)
    finally:
        for task in listening:
            task.cancel()
        await asyncio.gather(*listening, return_exceptions=True)


@record
class Signalled:
    """A signal to this process; in an event loop that is not the main thread's, none is heard."""

    signal: signal.Signals
    grace_s: float

    async def notice(self) -> Notice:
        arrived, name = asyncio.Event(), self.signal.name
        try:
            asyncio.get_running_loop().add_signal_handler(self.signal, arrived.set)
        except (RuntimeError, ValueError) as error:
            logger.warning("this worker does not hear %s: %s", name, error)
        await arrived.wait()
        return Notice(source=name.lower(), reason=f"{name} arrived", deadline_s=wall_clock() + self.grace_s)


class Asked(Protocol):
    """A place that answers only when asked."""

    async def ask(self) -> Notice | None:
        """The notice, if there is one; raises whatever it likes for an answer of no use."""


@record
class Polled:
    """A source that is asked time and again."""

    asked: Asked
    poll_s: float

    async def notice(self) -> Notice:
        logged = False
        while True:
            try:
                if notice := await self.asked.ask():
                    return notice
            except Exception as error:  # of any kind: a faulty service may not end a healthy worker
                if not logged:
                    logger.warning("%r gives no usable answer and is asked again and again: %r", self.asked, error)
                logged = True
            await asyncio.sleep(self.poll_s)


@record
class WatchedFile:
    """A file whose appearance is the notice; JSON in it may hold ``deadline_s`` (Unix) and ``reason``."""

    path: Path
    grace_s: float

    async def ask(self) -> Notice | None:
        if not self.path.exists():
            return None
        said: Any = None
        with contextlib.suppress(OSError, ValueError, RecursionError):  # its appearance is enough
            said = json.loads(self.path.read_bytes(), parse_int=float)
        if not isinstance(said, dict):
            said = {}
        deadline_s = said.get("deadline_s")
        told = isinstance(deadline_s, float) and abs(deadline_s) < TIMEOUT_MAX  # not NaN, and not milliseconds
        deadline_s = on_wall_clock(deadline_s) if told else wall_clock() + self.grace_s
        return Notice(source="file", reason=str(said.get("reason", f"{self.path} appeared")), deadline_s=deadline_s)


@dataclass(slots=True, kw_only=True)
class Aws:
    """EC2 spot interruption: ``spot/instance-action`` of the metadata service, version 2 (by token)."""

    base_url: str
    token: str = field(default="", repr=False)
    """Kept out of the log."""

    async def ask(self) -> Notice | None:
        if not self.token:
            self.token = await self._new_token()
        answer = await self._action()
        if answer.status not in (200, 404):  # mostly 401: the token expired
            self.token = await self._new_token()
            answer = await self._action()
        if answer.status == 404:
            return None
        said = json.loads(answer.text)
        deadline_s = _deadline_s(datetime.fromisoformat(said["time"]))
        return Notice(source="aws", reason=f"instance-action {said['action']}", deadline_s=deadline_s)

    async def _action(self) -> Answer:
        url = f"{self.base_url}/latest/meta-data/spot/instance-action"
        return await _fetch(url, {"X-aws-ec2-metadata-token": self.token})

    async def _new_token(self) -> str:
        url = f"{self.base_url}/latest/api/token"
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
        return (await _fetch(url, headers, method="PUT")).text


@dataclass(slots=True, kw_only=True)
class Gcp:
    """Compute Engine preemption: ``instance/preempted``, a question held open until the answer changes."""

    base_url: str
    grace_s: float
    etag: str = "NONE"
    """ETag of the last answer; the service answers at once if it does not know it."""

    async def ask(self) -> Notice | None:
        wait = f"wait_for_change=true&timeout_sec={WAIT_S:.0f}&last_etag={quote(self.etag)}"
        url = f"{self.base_url}/computeMetadata/v1/instance/preempted?{wait}"
        answer = await _fetch(url, {"Metadata-Flavor": "Google"}, answer_s=WAIT_S + ANSWER_S)
        preempted = {"TRUE": True, "FALSE": False}[answer.text]
        self.etag = answer.headers.get("ETag", "NONE")
        if not preempted:
            return None
        return Notice(source="gcp", reason="instance/preempted is TRUE", deadline_s=wall_clock() + self.grace_s)


@record
class Azure:
    """Azure Scheduled Events of type ``Preempt`` that name this machine."""

    base_url: str

    async def ask(self) -> Notice | None:
        events = json.loads(await self._get(f"scheduledevents?api-version={AZURE_EVENTS_VERSION}"))["Events"]
        preempting = [event for event in events if event["EventType"] == "Preempt"]
        if not preempting:
            return None
        # The events of a scale set reach all its machines, and each learns its name from the same service.
        name = await self._get(f"instance/compute/name?api-version={AZURE_INSTANCE_VERSION}&format=text")
        for event in preempting:
            if name.casefold() in (resource.casefold() for resource in event["Resources"]):
                return Notice(source="azure", reason=f"Preempt of {name}", deadline_s=_not_before_s(event["NotBefore"]))
        return None

    async def _get(self, what: str) -> str:
        return (await _fetch(f"{self.base_url}/metadata/{what}", {"Metadata": "true"})).text


SIGNALS = {"sigterm": signal.SIGTERM, "sigusr1": signal.SIGUSR1}
CLOUDS: dict[str, Callable[[str, float], Asked]] = {
    "aws": lambda base_url, grace_s: Aws(base_url=base_url),
    "gcp": lambda base_url, grace_s: Gcp(base_url=base_url, grace_s=grace_s),
    "azure": lambda base_url, grace_s: Azure(base_url=base_url),
}
"""AWS and Azure say themselves when the machine will be gone."""


def _source(setting: str, grace_s: float, poll_s: float) -> Source:
    name, colon, value = setting.partition(":")
    if name in SIGNALS and not colon:
        return Signalled(signal=SIGNALS[name], grace_s=grace_s)
    if name == "file" and value:
        return Polled(asked=WatchedFile(path=Path(value), grace_s=grace_s), poll_s=poll_s)
    if name in CLOUDS and (value.startswith("http://") or not colon):
        base_url = value.rstrip("/") or LINK_LOCAL
        return Polled(asked=CLOUDS[name](base_url, grace_s), poll_s=poll_s)
    raise ValueError(f"there is no source of notices {setting!r}")


@record
class Answer:
    """A metadata service's answer to one question."""

    url: str
    status: int
    headers: HTTPMessage
    content: bytes

    @property
    def text(self) -> str:
        """Its text; raises unless the service answered the question."""
        if self.status != 200:
            raise ValueError(f"HTTP {self.status} from {self.url}")
        return self.content.decode().strip()


async def _fetch(url: str, headers: Mapping[str, str], *, method: str = "GET", answer_s: float = ANSWER_S) -> Answer:
    """Any answer, whatever its status; raises where none came within ``answer_s``.

    On asyncio's own streams, because a question held open is called off when another source has its notice:
    Tornado's client leaves the connection behind then, and the standard library's would need a thread.
    """
    place = urlsplit(url)
    fields = {"Host": place.netloc, "Connection": "close", "Content-Length": "0", **headers}
    head = [f"{method} {url.removeprefix(f'{place.scheme}://{place.netloc}')} HTTP/1.1"]
    head += [f"{name}: {value}" for name, value in fields.items()]
    async with asyncio.timeout(answer_s):
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
        try:
            writer.write("\r\n".join([*head, "", ""]).encode())
            received = await _all(reader, url)
        finally:
            writer.close()
    response = HTTPResponse(_Received(received))  # type: ignore[arg-type]
    response.begin()
    return Answer(url=url, status=response.status, headers=response.headers, content=response.read())


async def _all(reader: asyncio.StreamReader, url: str) -> bytes:
    """All bytes until the service closes the connection, as the request told it to."""
    received = b""
    while more := await reader.read(ANSWER_BYTES):
        received += more
        if len(received) > ANSWER_BYTES:
            raise ValueError(f"{url} sends more than {ANSWER_BYTES} bytes")
    return received


class _Received:
    """What was received, with as much of a socket as the standard library's parser asks for."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._content)


def _not_before_s(text: str) -> float:
    """RFC 1123 time; empty where the event has already begun, so that no time is left."""
    return _deadline_s(parsedate_to_datetime(text)) if text else wall_clock()


def _deadline_s(moment: datetime) -> float:
    """On this process's clock. Clouds speak UTC, also where they leave the zone out."""
    return on_wall_clock((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
