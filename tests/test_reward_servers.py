"""A reward server that hangs, lies, fails or refuses loses and invents nothing: real servers on this machine."""

from __future__ import annotations

import base64
import errno
import io
import itertools
import json
import re
import socket
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image

from spotlight.config import RewardSection
from spotlight.records import Prompt, SpotlightError
from spotlight.rl.rewards import build, score
from spotlight.rl.rewards import server as reward_server
from spotlight.rl.rewards.base import Unreachable
from spotlight.rl.rewards.server import KEY, ChatOcrScorer, ChatScorer, HttpScorer, number_in

IMAGES = np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1).repeat(3, axis=-1)
"""Four images, told apart by their only pixel."""
PROMPTS = ['"a"', '"b"', '"c"', '"d"']

Answer = tuple[int, bytes]


class Server:
    """Answers as ``reply`` says, and remembers what it was asked."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[tuple[str, Mapping[str, Any], Mapping[str, str]]] = []


@contextmanager
def serving(reply: Callable[[int, Mapping[str, Any]], Answer], port: int = 0) -> Iterator[Server]:
    """A server whose answer to its n-th question (from 1) is the reply to (n, what was asked)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, payload, dict(self.headers)))
            try:
                code, content = reply(len(server.asked), payload)
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # the client gave up

        def do_GET(self) -> None:
            server.asked.append((self.path, {}, dict(self.headers)))
            self.send_response(404)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    listening = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server = Server(f"http://127.0.0.1:{listening.server_port}")
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def pixels(payload: Mapping[str, Any]) -> list[int]:
    pictures = [Image.open(io.BytesIO(base64.b64decode(image))) for image in payload["images"]]
    return [int(np.asarray(picture)[0, 0, 0]) for picture in pictures]


def honest(payload: Mapping[str, Any]) -> Answer:
    return 200, json.dumps({"rewards": [pixel / 10 for pixel in pixels(payload)]}).encode()


EXPECTED = [0.0, 0.1, 0.2, 0.3]


def test_images_and_prompts_arrive_and_rewards_come_back() -> None:
    with serving(lambda _, payload: honest(payload)) as server:
        values, errors = score(HttpScorer(server.url), IMAGES, PROMPTS, attempts=1)

    ((path, payload, _),) = server.asked
    assert (values, errors) == (EXPECTED, [])
    assert path == "/compute"
    assert payload["prompts"] == PROMPTS


@pytest.mark.parametrize("code", [500, 503, 408, 429])
def test_a_failure_that_passes_costs_nothing(code: int) -> None:
    with serving(lambda turn, payload: honest(payload) if turn > 1 else (code, b"")) as server:
        values, _ = score(HttpScorer(server.url), IMAGES, PROMPTS, attempts=2)

    assert values == EXPECTED
    assert len(server.asked) == 2


@pytest.mark.parametrize("code", [400, 401, 404, 422])
def test_what_a_server_refuses_is_asked_once_more_image_by_image_and_then_missing(code: int) -> None:
    with serving(lambda *_: (code, b"")) as server:
        values, errors = score(HttpScorer(server.url), IMAGES, PROMPTS, attempts=5)

    assert values == [None] * 4
    assert all(f"answered {code}" in error for error in errors)
    assert [len(payload["prompts"]) for _, payload, _ in server.asked] == [4, 1, 1, 1, 1]


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://", "http://a:b", "https://a b", "http://a/b c"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(SpotlightError, match=r"reward\.url = .*: give the server's address, such as http://127"):
        HttpScorer(url)


def test_an_address_with_a_password_is_refused_and_not_shown() -> None:
    with pytest.raises(SpotlightError, match="take a key from SPOTLIGHT_REWARD_KEY") as raised:
        HttpScorer("http://me:secret@scores:8000")
    assert "secret" not in str(raised.value)


LIES = {
    "too few": {"rewards": []},
    "too many": {"rewards": [0.5] * 9},
    "NaN": {"rewards": [float("nan")] * 4},
    "infinite": {"rewards": [float("inf")] * 4},
    "beyond its range": {"rewards": [7.0] * 4},
    "words": {"rewards": ["good"] * 4},
    "yes": {"rewards": [True] * 4},
    "nothing": {},
    "a list": [0.5] * 4,
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_some_images_leaves_the_rewards_of_the_others(lie: str) -> None:
    """A batch is answered with the lie, and so is the third image alone."""

    def reply(turn: int, payload: Mapping[str, Any]) -> Answer:
        alone = len(payload["prompts"]) == 1
        return honest(payload) if alone and pixels(payload) != [2] else (200, json.dumps(LIES[lie]).encode())

    with serving(reply) as server:
        values, errors = score(HttpScorer(server.url), IMAGES, PROMPTS, attempts=2)

    assert values == [0.0, 0.1, None, 0.3]
    assert len(errors) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\x80\x04N.", b"[" * 100_000])
def test_what_is_no_json_is_a_missing_reward(content: bytes) -> None:
    with serving(lambda *_: (200, content)) as server:
        values, errors = score(HttpScorer(server.url), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [None]
    assert errors


def test_a_server_that_hangs_is_given_up_in_time() -> None:
    over = threading.Event()

    def hang(turn: int, payload: Mapping[str, Any]) -> Answer:
        over.wait(20)
        return honest(payload)

    began_s = time.monotonic()
    with serving(hang) as server:
        values, errors = score(HttpScorer(server.url, timeout_s=0.2), IMAGES[:1], PROMPTS[:1], attempts=2)
        over.set()

    assert values == [None]
    assert "timed out" in errors[0].lower() or "timeout" in errors[0].lower()
    assert time.monotonic() - began_s < 10


def test_an_answer_whose_parts_take_too_long_together_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = itertools.count()
    monkeypatch.setattr(reward_server, "time", SimpleNamespace(monotonic=lambda: float(next(now_s))))  # a second a look
    with serving(lambda _, payload: honest(payload)) as server:
        values, (error,) = score(HttpScorer(server.url, timeout_s=0.5), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [None]
    assert "was still answering after reward.timeout_s = 0.5 s" in error


def test_an_endless_answer_is_given_up() -> None:
    with serving(lambda *_: (200, b" " * 5_000_000)) as server:
        values, errors = score(HttpScorer(server.url), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [None]
    assert "more than" in errors[0]


def test_what_a_prompts_line_says_is_sent_along() -> None:
    prompts = [Prompt(id=0, text="a", metadata='{"tag": "one"}'), Prompt(id=1, text="b")]
    with serving(lambda _, payload: honest(payload)) as server:
        score(HttpScorer(server.url), IMAGES[:2], prompts, attempts=1)

    ((_, payload, _),) = server.asked
    assert payload["extra"] == {"metadata": [{"tag": "one"}, {}]}


def test_a_server_that_is_not_there_is_a_missing_reward() -> None:
    values, errors = score(HttpScorer("http://127.0.0.1:9"), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [None]
    assert errors


@pytest.mark.parametrize("code", [429, 503])
def test_a_server_that_is_busy_is_waited_for_and_no_attempt_is_lost(code: int) -> None:
    with serving(lambda n, payload: (code, b"later") if n <= 3 else honest(payload)) as server:
        values, errors = score(HttpScorer(server.url), IMAGES, PROMPTS, attempts=1, patience_s=60.0)

    assert (values, errors) == (EXPECTED, [])
    assert len(server.asked) == 4


def test_a_busy_server_whose_page_breaks_off_is_waited_for() -> None:
    broken_off = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n10\r\nbusy"
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection, connection.makefile("rwb") as file:
                length = next(int(line.split()[1]) for line in file if line.lower().startswith(b"content-length"))
                assert b"prompts" in file.read(length + 2)
                file.write(broken_off)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            with pytest.raises(Unreachable, match="answered 503"):
                HttpScorer(f"http://127.0.0.1:{listening.getsockname()[1]}")(IMAGES, PROMPTS)
        finally:
            thread.join()


def test_a_server_that_is_started_late_is_waited_for() -> None:
    with serving(lambda n, payload: honest(payload)) as server:
        url = server.url
    port, began = urlsplit(url).port, threading.Event()
    assert port is not None

    def late() -> None:
        began.wait()
        time.sleep(0.3)
        with serving(lambda n, payload: honest(payload), port=port):
            done.wait()

    done, thread = threading.Event(), threading.Thread(target=late)
    thread.start()
    began.set()
    try:
        values, _ = score(HttpScorer(url), IMAGES, PROMPTS, attempts=1, patience_s=60.0)
    finally:
        done.set()
        thread.join()

    assert values == EXPECTED


def test_a_server_that_stays_away_ends_the_run_with_its_address_and_the_way_out() -> None:
    says = r"127\.0\.0\.1:9/compute cannot be reached .*, for 0\.1 s .*resume the run"

    with pytest.raises(SpotlightError, match=says):
        score(HttpScorer("http://127.0.0.1:9"), IMAGES, PROMPTS, attempts=3, patience_s=0.1)


def test_a_server_that_breaks_every_connection_ends_the_run_with_what_it_was_asked() -> None:
    def fail(n: int, payload: Mapping[str, Any]) -> Answer:
        raise ConnectionResetError

    says = f"broke the connection .*resume the run; .* at one of {len(IMAGES)} images of '{PROMPTS[0]}'.* answer 400"
    with serving(fail) as server, pytest.raises(SpotlightError, match=says):
        score(HttpScorer(server.url), IMAGES, PROMPTS, attempts=3, patience_s=0.1)


@pytest.mark.parametrize(
    "why", [socket.gaierror(-2, "Name or service not known"), OSError(errno.EHOSTUNREACH, "No route to host")]
)
def test_a_machine_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch, why: OSError) -> None:
    real, tries = reward_server.OPENER.open, []

    def late(*given: Any, **how: Any) -> Any:
        tries.append(given)
        if len(tries) <= 2:
            raise urllib.error.URLError(why)
        return real(*given, **how)

    monkeypatch.setattr(reward_server.OPENER, "open", late)
    with serving(lambda n, payload: honest(payload)) as there:
        values, _ = score(HttpScorer(there.url), IMAGES, PROMPTS, attempts=1, patience_s=60.0)

    assert values == EXPECTED


@pytest.mark.parametrize(
    ("code", "content", "says"),
    [
        (
            422,
            b'{"detail": "field required: foo"}',
            "/compute answered 422 Unproc.*: .*field required: foo",
        ),
        (500, b"Traceback: no CUDA", "/compute answered 500 Internal Server Error: Traceback: no CUDA"),
        (200, b"<html>welcome</html>", "/compute answered with no JSON object: <html>welcome"),
        (200, b'{"scores": [1]}', "without a list of .rewards.: {'scores'"),
    ],
)
def test_an_error_shows_the_address_and_what_came(code: int, content: bytes, says: str) -> None:
    with serving(lambda n, payload: (code, content)) as server:
        _, (error,) = score(HttpScorer(server.url), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert server.url in error
    assert re.search(says, error)


def test_a_late_answer_names_the_setting() -> None:
    def slowly(n: int, payload: Mapping[str, Any]) -> Answer:
        time.sleep(1.0)
        return honest(payload)

    with serving(slowly) as server:
        _, (error,) = score(HttpScorer(server.url, timeout_s=0.2), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert "did not answer within reward.timeout_s = 0.2 s" in error


def chat(text: str) -> Answer:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


def test_a_chat_is_asked_with_the_image_and_its_number_is_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    with serving(lambda *_: chat('```json\n{"score": 7.5}\n```')) as server:
        values, _ = score(ChatScorer(server.url, model="vl"), IMAGES[:1], ["a {cat}"], attempts=1)

    ((path, payload, headers),) = server.asked
    text, picture = payload["messages"][0]["content"]
    assert values == [7.5]
    assert path == "/v1/chat/completions"
    assert payload["model"] == "vl"
    assert payload["temperature"] == 0  # the same image gets the same reward
    assert "a {cat}" in text["text"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert headers["Authorization"] == "Bearer secret"


def test_a_key_is_sent_without_the_space_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file that an environment was filled from may end with a line break."""
    monkeypatch.setenv(KEY, " secret\n")
    with serving(lambda *_: chat("7")) as server:
        values, _ = score(ChatScorer(server.url), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [7.0]
    assert server.asked[0][2]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("key", ["sec\nret", "s\u00e9cret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(KEY, key)

    with pytest.raises(SpotlightError, match=rf"^{KEY} holds more than .*: set it anew$") as refused:
        score(ChatScorer("http://127.0.0.1:9"), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert "cret" not in str(refused.value)


def test_a_chat_reads_text_for_the_ocr_reward() -> None:
    with serving(lambda *_: chat("Open  late")) as server:
        values, _ = score(ChatOcrScorer(server.url), IMAGES[:2], ['a "Open Late"', 'a "shut"'], attempts=1)
        strict, _ = score(ChatOcrScorer(server.url, graded=False), IMAGES[:1], ['a "Open Lane"'], attempts=1)

    assert values == [1.0, 0.0]
    assert strict == [0.0]  # 7 of 8 letters


@pytest.mark.parametrize("reply", ["I cannot say.", "between 3 and 5", '{"score": null}', '{"score": true}', ""])
def test_a_reply_without_one_number_is_no_score(reply: str) -> None:
    with pytest.raises(ValueError, match="no single score"):
        number_in(reply)


def test_a_table_of_settings_makes_the_scorer_of_a_server() -> None:
    with serving(lambda *_: (200, b'{"rewards": [40.0]}')) as server:
        scorer = build(RewardSection(name="http", url=server.url, range=(0.0, 100.0)))
        values, _ = score(scorer, IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [40.0]


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "localhost:80", "ftp://host", "http://host:abc"])
def test_only_the_address_of_a_web_server_is_taken(url: str) -> None:
    with pytest.raises(SpotlightError, match=r"reward\.url"):
        build(RewardSection(name="http", url=url))


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_says_where_to(code: int) -> None:
    with serving(lambda *_: (code, b"")) as server:
        values, errors = score(HttpScorer(server.url), IMAGES[:1], PROMPTS[:1], attempts=3)

    assert values == [None]
    assert "it is at /elsewhere, so give that as reward.url" in errors[0]
    assert [path for path, *_ in server.asked] == ["/compute"]


@pytest.mark.parametrize("question", ['Rate {prompt}. Reply {"score": S}', "{0}", "{", "{prompt.x}"])
def test_a_question_that_cannot_be_asked_is_refused(question: str) -> None:
    with pytest.raises(SpotlightError, match=r"reward\.options\.question = .*other braces are doubled"):
        ChatScorer("http://127.0.0.1:9", question=question)


def test_an_error_is_kept_in_part_however_long_it_is() -> None:
    long = json.dumps({"rewards": ["x" * 1_000_000]}).encode()
    with serving(lambda *_: (200, long)) as server:
        values, errors = score(HttpScorer(server.url), IMAGES[:1], PROMPTS[:1], attempts=1)

    assert values == [None]
    assert len(errors[0]) < 3000


@pytest.mark.parametrize(
    ("reply", "expected"), [(".5", 0.5), ("Score: -.5", -0.5), ("7.", 7.0), ("1e1", 10.0), ("8", 8.0)]
)
def test_a_number_is_read_as_it_is_written(reply: str, expected: float) -> None:
    assert number_in(reply) == expected
