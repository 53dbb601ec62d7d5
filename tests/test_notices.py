"""Claims about preemption notices: real signals, real files, and servers that speak each cloud's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import parse_qs, urlsplit

import pytest

from cluster.worker import notices
from cluster.worker.notices import ANSWER_BYTES, Aws, Notice, first_notice, sources
from spotlight import clock
from spotlight.clock import wall_clock
from spotlight.config import PoolSection

T = TypeVar("T")
WAIT_S = 60.0
"""Longest that a test waits for something that takes milliseconds."""
GRACE_S = 45.0
POLL_S = 0.01
DEADLINE_S = datetime(2026, 11, 21, 8, 22, 5, tzinfo=UTC).timestamp()
"""What every faked cloud announces, written as that cloud does."""
TOLD: Any = pytest.approx(DEADLINE_S, abs=1.0)
"""On the clock of this process."""


@pytest.mark.parametrize("name", ["sigterm", "sigusr1"])
def test_a_signal_is_a_notice_and_the_same_signal_again_does_not_kill(name: str) -> None:
    listener = f"""
import asyncio, sys
from cluster.worker.notices import first_notice, sources

async def listen():
    waiting = asyncio.create_task(first_notice(sources([{name!r}], grace_s={GRACE_S})))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    print("listening", flush=True)
    notice = await waiting
    print(notice.source, notice.deadline_s, flush=True)
    sys.stdin.read()  # until the test closes it: this worker is still leaving

asyncio.run(listen())
"""
    arriving = signal.Signals[name.upper()]
    command = [sys.executable, "-c", listener]

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "listening\n"
        sent_s = time.time()
        process.send_signal(arriving)
        source, deadline_s = process.stdout.readline().split()
        heard_s = time.time()
        process.send_signal(arriving)
        process.stdin.close()

    assert source == name
    assert sent_s + GRACE_S <= float(deadline_s) <= heard_s + GRACE_S
    assert process.returncode == 0


@pytest.mark.parametrize("number", [int, float])
def test_a_file_that_says_when_and_why_is_believed(tmp_path: Path, number: Callable[[float], float]) -> None:
    path = tmp_path / "notice.json"
    path.write_text(json.dumps({"deadline_s": number(DEADLINE_S), "reason": "maintenance"}))

    notice = hear(f"file:{path}")

    assert notice == Notice(source="file", reason="maintenance", deadline_s=TOLD)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"soon",
        b"\xff{",
        b"[1]",
        b'{"deadline_s": "soon"}',
        b'{"deadline_s": NaN}',
        pytest.param(b'{"deadline_s": 1795249325000}', id="milliseconds"),
        b'{"deadline_s": tr',
        pytest.param(b"[" * 100_000, id="nested"),
    ],
)
def test_a_file_that_says_nothing_of_use_is_a_notice_all_the_same(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notice"
    path.write_bytes(content)
    before_s = time.time()

    notice = hear(f"file:{path}")

    assert before_s + GRACE_S <= notice.deadline_s <= time.time() + GRACE_S


def test_a_time_without_a_zone_is_utc_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "JST-9")
    time.tzset()
    try:
        told = notices._deadline_s(datetime(2026, 11, 21, 8, 22, 5))
    finally:
        monkeypatch.undo()
        time.tzset()

    assert told == TOLD


@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
def test_what_is_left_is_right_though_the_machines_clock_was_set_since_its_process_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    path, began_s = tmp_path / "notice", wall_clock()
    path.write_text(json.dumps({"deadline_s": began_s + ahead_s + 120.0}))
    monkeypatch.setattr(clock, "system_clock", lambda: wall_clock() + ahead_s)

    notice = hear(f"file:{path}")

    assert notice.deadline_s == pytest.approx(began_s + 120.0, abs=0.01)


def test_a_file_is_no_notice_until_it_appears(tmp_path: Path) -> None:
    path = tmp_path / "notice"

    async def scenario() -> tuple[bool, Notice]:
        waiting = asyncio.create_task(first_notice(sources([f"file:{path}"], poll_s=POLL_S)))
        await asyncio.sleep(5 * POLL_S)
        early = waiting.done()
        path.touch()
        return early, await waiting

    early, notice = run(scenario)

    assert not early
    assert notice.reason == f"{path} appeared"


def test_aws_says_when_its_token_is_good_and_the_machine_is_marked() -> None:
    aws = FakeAws(quiet=2)

    with serving(aws) as url:
        notice = hear(f"aws:{url}")

    assert notice == Notice(source="aws", reason="instance-action terminate", deadline_s=TOLD)
    assert aws.asked == 3  # twice it had nothing to say
    assert aws.issued == 1  # a token lasts for hours


def test_an_expired_aws_token_is_renewed() -> None:
    aws = FakeAws(quiet=3, uses_per_token=2)

    with serving(aws) as url:
        notice = hear(f"aws:{url}")

    assert notice.deadline_s == TOLD
    assert aws.issued == 2  # of four answered questions, two for each token


def test_gcp_answers_a_question_held_open_as_soon_as_the_machine_is_preempted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "ANSWER_S", 0.05)  # it is given the time that it holds the question, too
    gcp = FakeGcp()
    before_s = time.time()

    with serving(gcp) as url:

        async def scenario() -> Notice:
            waiting = asyncio.create_task(first_notice(sources([f"gcp:{url}"], grace_s=GRACE_S, poll_s=POLL_S)))
            await asyncio.to_thread(gcp.held.wait, WAIT_S)
            await asyncio.sleep(0.1)
            gcp.preempt()
            return await waiting

        notice = run(scenario)

    assert (notice.source, gcp.asked) == ("gcp", 2)  # FALSE at once, and one question until it changed
    assert before_s + GRACE_S <= notice.deadline_s <= time.time() + GRACE_S


def test_azure_events_count_if_they_preempt_this_machine() -> None:
    others = [azure_event("Preempt", "trainer_1"), azure_event("Reboot", "trainer_0")]
    azure = FakeAzure([[], others, [*others, azure_event("Preempt", "trainer_1", "Trainer_0")]])

    with serving(azure) as url:
        notice = hear(f"azure:{url}")

    assert notice == Notice(source="azure", reason="Preempt of trainer_0", deadline_s=TOLD)
    assert azure.asked == 3  # neither no events nor those of others were a notice


def test_an_azure_event_that_has_begun_leaves_no_time() -> None:
    azure = FakeAzure([[{**azure_event("Preempt", "trainer_0"), "NotBefore": ""}]])
    before_s = time.time()

    with serving(azure) as url:
        notice = hear(f"azure:{url}")

    assert before_s <= notice.deadline_s <= time.time()


@pytest.mark.parametrize(
    "fault", [b"", b"<html>\r\nlog in\r\n</html>", b"[]", b'{"Events": [{}]}', b"\xff", 301, 404, 500, "hang up"]
)
@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_faulty_service_is_no_notice_and_is_logged_once(
    cloud: str, fault: bytes | int | str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each fault comes three times, before the service recovers and announces the preemption."""
    clouds: dict[str, Service] = {
        "aws": FakeAws(),
        "gcp": FakeGcp(preempted=True),
        "azure": FakeAzure([[azure_event("Preempt", "trainer_0")]]),
    }
    faulty = Faulty(clouds[cloud], fault, times=3)

    with serving(faulty) as url, caplog.at_level(logging.WARNING, logger="spotlight.notices"):
        notice = hear(f"{cloud}:{url}")

    assert notice.source == cloud
    assert faulty.left == 0
    assert len(caplog.records) == 1
    assert url in caplog.text


def test_the_aws_token_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    aws = FakeAws(garbled=1)

    with serving(aws) as url:
        hear(f"aws:{url}")

    assert "JSONDecodeError" in caplog.text
    assert FakeAws.TOKEN not in caplog.text


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_nobody_there_is_no_notice_and_keeps_no_other_source_waiting(
    cloud: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = tmp_path / "notice"

    async def scenario() -> Notice:
        listening = sources([f"{cloud}:http://127.0.0.1:{port}", f"file:{path}"], poll_s=POLL_S)
        waiting = asyncio.create_task(first_notice(listening))
        while not caplog.records:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(5 * POLL_S)  # asked again, and silent about it
        path.touch()
        return await waiting

    notice = run(scenario)

    assert notice.source == "file"
    assert len(caplog.records) == 1


def test_a_service_that_never_answers_is_left_behind_at_once(tmp_path: Path) -> None:
    path = tmp_path / "notice"

    async def scenario() -> tuple[Notice, set[asyncio.Task[Any]]]:
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(first_notice(sources([f"gcp:{url}", f"file:{path}"], poll_s=POLL_S)))
        connection, _ = await asyncio.to_thread(mute.accept)
        with connection:
            path.touch()
            return await waiting, asyncio.all_tasks() - before

    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        notice, still_listening = run(scenario)

    assert notice.source == "file"
    assert still_listening == set()


def test_of_two_notices_at_once_the_one_with_less_time_left_counts(tmp_path: Path) -> None:
    late, soon = tmp_path / "late", tmp_path / "soon"
    late.write_text(json.dumps({"deadline_s": DEADLINE_S + 90}))
    soon.write_text(json.dumps({"deadline_s": DEADLINE_S}))

    notice = hear(f"file:{late}", f"file:{soon}")

    assert notice.deadline_s == TOLD


def test_beside_the_main_thread_which_alone_gets_signals_other_sources_are_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a worker of a `LocalCluster(processes=False)`."""
    (tmp_path / "gone").touch()

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(hear, "sigterm", f"file:{tmp_path / 'gone'}").result(WAIT_S)

    assert found.source == "file"
    assert "this worker does not hear SIGTERM" in caplog.text


def test_without_sources_there_is_never_a_notice() -> None:
    async def scenario() -> None:
        await asyncio.wait_for(first_notice([]), timeout=5 * POLL_S)

    with pytest.raises(TimeoutError):
        run(scenario)


def test_clouds_are_asked_where_they_serve_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    async def refuse(host: str, port: int) -> None:
        asked.append((host, port))
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", refuse)
    for source in cast(Any, sources(["aws", "gcp", "azure"])):
        with pytest.raises(ConnectionRefusedError):
            run(source.asked.ask)

    assert asked == [("169.254.169.254", 80)] * 3


@pytest.mark.parametrize(
    "name", ["", "spot", "SIGTERM", "sigterm:30", "file", "file:", "aws:", "aws:127.0.0.1:80", "gcp:file:///etc/passwd"]
)
def test_there_are_no_other_sources(name: str) -> None:
    with pytest.raises(ValueError, match="there is no source"):
        PoolSection(usd_per_h=1, notices=("sigterm", name))
    with pytest.raises(ValueError, match="there is no source"):
        sources(["sigterm", name])


@pytest.mark.parametrize("name", ["sigterm", "sigusr1", "file:a b", "aws", "gcp:http://127.0.0.1:80", "azure"])
def test_settings_take_the_sources_that_there_are(name: str) -> None:
    assert len(sources(PoolSection(usd_per_h=1, notices=(name,)).notices)) == 1


def hear(*names: str) -> Notice:
    """The first notice of these sources."""

    async def scenario() -> Notice:
        return await first_notice(sources(names, grace_s=GRACE_S, poll_s=POLL_S))

    return run(scenario)


def run(scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a scenario to its end, or fail if it hangs."""
    return asyncio.run(asyncio.wait_for(scenario(), timeout=WAIT_S))


Answer = tuple[int, bytes, dict[str, str]]
"""Status, body and headers."""


class Service(Protocol):
    """A metadata service, as seen by its HTTP server."""

    def answer(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Answer | None:
        """The answer; None breaks the connection."""


class FakeAws:
    """EC2's metadata service, version 2."""

    TOKEN = "AQAEAsecret"

    def __init__(self, *, quiet: int = 0, uses_per_token: int = 1000, garbled: int = 0) -> None:
        """At first ``quiet`` times nothing to say, and ``garbled`` times something broken."""
        self.quiet, self.garbled = quiet, garbled
        self.uses_per_token, self.uses_left = uses_per_token, 0
        self.issued = self.asked = 0

    def answer(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Answer | None:
        if (method, path) == ("PUT", "/latest/api/token"):
            if not 1 <= int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600:
                return 400, b"", {}
            self.issued += 1
            self.uses_left = self.uses_per_token
            return 200, self._token.encode(), {}
        if (method, path) != ("GET", "/latest/meta-data/spot/instance-action"):
            return 400, b"", {}
        token = headers["X-aws-ec2-metadata-token"]
        if not token.startswith(self.TOKEN):
            return 400, b"", {}
        if token != self._token or not self.uses_left:
            return 401, b"", {}
        self.uses_left -= 1
        self.asked += 1
        if self.asked <= self.quiet:
            return 404, b"<html>Not Found</html>", {}
        if self.asked <= self.garbled:
            return 200, b"{", {}
        return 200, b'{"action": "terminate", "time": "2026-11-21T08:22:05Z"}', {}

    @property
    def _token(self) -> str:
        return f"{self.TOKEN}{self.issued}=="


class FakeGcp:
    """Compute Engine's metadata server."""

    def __init__(self, *, preempted: bool = False) -> None:
        self.changed, self.held = threading.Event(), threading.Event()
        self.asked = 0
        if preempted:
            self.preempt()

    def preempt(self) -> None:
        self.changed.set()

    def answer(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Answer | None:
        if (method, path) != ("GET", "/computeMetadata/v1/instance/preempted"):
            return 404, b"", {}
        if headers["Metadata-Flavor"] != "Google":
            return 403, b"", {}
        self.asked += 1
        if query.get("wait_for_change") == "true" and query.get("last_etag") == self._etag:
            self.held.set()
            self.changed.wait(float(query["timeout_sec"]))
        return 200, b"TRUE" if self.changed.is_set() else b"FALSE", {"ETag": self._etag}

    @property
    def _etag(self) -> str:
        return "5f0c" if self.changed.is_set() else "4d61"


class FakeAzure:
    """Azure's metadata service of the machine trainer_0."""

    def __init__(self, schedule: Sequence[Sequence[Mapping[str, object]]]) -> None:
        """The events it tells at the first question, the second, ...; then always the last."""
        self.schedule = schedule
        self.asked = 0

    def answer(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Answer | None:
        if method != "GET" or headers["Metadata"] != "true" or "api-version" not in query:
            return 400, b'{"error": "Bad request"}', {}
        if path == "/metadata/instance/compute/name" and query.get("format") == "text":
            return 200, b"trainer_0", {}
        if path != "/metadata/scheduledevents":
            return 404, b"", {}
        events = self.schedule[min(self.asked, len(self.schedule) - 1)]
        self.asked += 1
        return 200, json.dumps({"DocumentIncarnation": self.asked, "Events": events}).encode(), {}


def azure_event(kind: str, *machines: str) -> dict[str, object]:
    return {
        "EventId": "A123BC45-1234-5678-AB90-ABCDEF123456",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": machines,
        "EventStatus": "Scheduled",
        "NotBefore": "Sat, 21 Nov 2026 08:22:05 GMT",
    }


class Faulty:
    """A service that first answers so many questions, whatever they are, with the same fault."""

    def __init__(self, service: Service, fault: bytes | int | str, *, times: int) -> None:
        """The fault is a body, a status, or a word to break the connection."""
        self.service, self.fault, self.left = service, fault, times

    def answer(self, method: str, path: str, query: Mapping[str, str], headers: Message) -> Answer | None:
        if not self.left:
            return self.service.answer(method, path, query, headers)
        self.left -= 1
        if isinstance(self.fault, str):
            return None
        if isinstance(self.fault, int):
            return self.fault, b"", {"Location": "/elsewhere"}
        return 200, self.fault, {}


@contextlib.contextmanager
def serving(service: Service) -> Iterator[str]:
    """The base URL of a real HTTP server that answers as the service does."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            answer = service.answer(self.command, url.path, query, self.headers)
            if answer is None:
                self.close_connection = True
                return
            status, body, headers = answer
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Keeps quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": POLL_S})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    sent_bytes = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent_bytes
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(bytes(2**16))
                sent_bytes += 2**16
                await writer.drain()

    async def scenario() -> None:
        server = await asyncio.start_server(flood, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises(ValueError, match=f"sends more than {ANSWER_BYTES} bytes"):
                await Aws(base_url=f"http://127.0.0.1:{port}").ask()
        finally:
            server.close()

    run(scenario)

    assert sent_bytes < 16 * ANSWER_BYTES
