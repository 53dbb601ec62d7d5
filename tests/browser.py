"""Headless Chromium, driven over its own protocol: opens a page, says what its console said, and takes pictures."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import WebSocketClientConnection, websocket_connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
]
START_S = 60.0
SETTLE_S = 1.5
"""For plots to be drawn anew in a window of another size."""
IDLE = "window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents.every(one => one.is_idle)"


class Page:
    """One page of the browser."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket, self._number = socket, 0
        self._width_px = 0
        self.errors: list[str] = []
        """What the console and the page complained of so far."""

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        """A command of Chromium's protocol; what comes meanwhile is taken note of."""
        self._number += 1
        number = self._number
        await self._socket.write_message(json.dumps({"id": number, "method": method, "params": given}))
        while True:
            text = await self._socket.read_message()
            assert text is not None, "the browser is gone"
            message = json.loads(text)
            if message.get("id") == number:
                return dict(message.get("result", {}))
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(told["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(each.get("value", each.get("description"))) for each in told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] == "error":
                self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")

    async def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    async def open(self, url: str, *, width_px: int, height_px: int = 1000) -> None:
        """Open an address, and wait until Bokeh has drawn it."""
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        self._width_px = width_px
        await self._resize(width_px, height_px)
        await self.call("Page.navigate", url=url)
        await self.until(IDLE)

    async def until(self, expression: str, wait_s: float = START_S) -> Any:
        """Wait until an expression is true in the page; returns its value."""
        deadline_s = time.monotonic() + wait_s
        while not (value := await self.js(expression)):
            assert time.monotonic() < deadline_s, f"waited {wait_s} s for {expression}; {self.errors}"
            await asyncio.sleep(0.1)
        return value

    async def picture(self, path: Path) -> None:
        """Write what the whole page looks like now, as PNG; its window grows to the page's end for that."""
        height_px = await self.js("document.documentElement.scrollHeight")
        await self._resize(self._width_px, height_px)
        await asyncio.sleep(SETTLE_S)
        found = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    async def _resize(self, width_px: int, height_px: int) -> None:
        size = {"width": width_px, "height": height_px, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)


@asynccontextmanager
async def browser() -> AsyncIterator[Page]:
    """A browser with one empty page, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            socket = await websocket_connect(await _address(Path(profile)), max_message_size=64 << 20)
            page = Page(socket)
            yield page
            with suppress(AssertionError):
                await page.call("Browser.close")
            socket.close()
        finally:
            process.terminate()
            process.wait(10)


async def _address(profile: Path) -> str:
    """Of the empty page, once the browser listens."""
    file, deadline_s = profile / "DevToolsActivePort", time.monotonic() + START_S
    while not (file.exists() and file.read_text().count("\n")):
        assert time.monotonic() < deadline_s, "the browser did not start"
        await asyncio.sleep(0.05)
    port = file.read_text().split()[0]
    found = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}/json/list")
    return str(next(each for each in json.loads(found.body) if each["type"] == "page")["webSocketDebuggerUrl"])
