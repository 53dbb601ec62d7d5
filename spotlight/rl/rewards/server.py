"""Rewards from a server: Flow-Factory's JSON, or any OpenAI-compatible chat; never pickle.

What a server says is not believed: how many rewards came, whether they are numbers, how long the answer is and how
long it took are checked. What is refused (4xx) is not asked again; 408 and 5xx are. A server
that is not there, or busy (429, 502 to 504), is waited for.
"""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from spotlight.files import shown
from spotlight.records import Prompt, SpotlightError
from spotlight.rl.rewards.base import Broken, Refused, Scorer, Unreachable
from spotlight.rl.rewards.ocr import READ, ocr_score, quoted_target

AGAIN = (408,)
"""The 4xx that is worth another attempt, as are all 5xx."""
BUSY = (429, 502, 503, 504)
"""The server, or a proxy before it, has no time now or is not up yet."""
AWAY = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
SAID_MAX = 200
"""Characters of an answer that an error shows."""
ANSWER_BYTES_MAX = 4_000_000
"""A longer answer is no list of rewards."""
KEY = "SPOTLIGHT_REWARD_KEY"
"""Environment variable with the key that a chat server wants; keys are no settings, which are written down."""
QUESTION = (
    'How well does this image match the prompt "{prompt}"? Answer with JSON alone: {{"score": S}}, S from 0 to 10.'
)


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: neither the key nor the images are for another server, and a POST would become a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


OPENER = urllib.request.build_opener(_Stays)


class HttpScorer(Scorer):
    """Asks ``POST URL/compute`` with ``{"prompts": [...], "images": [base64 PNG, ...]}`` for ``{"rewards": [...]}``.

    Prompts whose lines say more than a text send that along, as ``{"extra": {"metadata": [{...}, ...]}}``.

    Source: Flow-Factory's reward_server/example_server.py.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0, within: tuple[float, float] = (0.0, 1.0)) -> None:
        self._url, self._timeout_s, self.range = checked_url(url), timeout_s, within  # type: ignore[misc]

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        return self.of(images_BHWC, [Prompt(id=0, text=text) for text in prompts])

    def of(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> list[float]:
        payload: dict[str, Any] = {
            "prompts": [prompt.text for prompt in prompts],
            "images": [encoded_png(image) for image in images_BHWC],
        }
        if any(prompt.metadata for prompt in prompts):
            payload["extra"] = {"metadata": [json.loads(prompt.metadata or "{}") for prompt in prompts]}
        answer = post(f"{self._url}/compute", payload, timeout_s=self._timeout_s)
        rewards = answer.get("rewards")
        if not isinstance(rewards, list):
            raise ValueError(f'{self._url}/compute answered without a list of "rewards": {_start_of(answer)}')
        return rewards


class ChatScorer(Scorer):
    """Asks a vision-language model, over ``POST URL/v1/chat/completions``, for a number.

    Args:
        model: its name on the server.
        question: what it is asked; ``{prompt}`` stands for the prompt.
    """

    range = (0.0, 10.0)

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        question: str = QUESTION,
        timeout_s: float = 60.0,
        within: tuple[float, float] = (0.0, 10.0),
    ) -> None:
        self._url, self._model, self._question, self._timeout_s = checked_url(url), model, question, timeout_s
        self.range = within  # type: ignore[misc]  # of this one
        try:
            question.format(prompt="")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise SpotlightError(
                f"reward.options.question = {shown(question)}: {error!r}: {{prompt}} stands for the prompt, and other "
                "braces are doubled: {{ and }}"
            ) from None

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        return [
            number_in(self._ask(image, self._question.format(prompt=prompt)))
            for image, prompt in zip(images_BHWC, prompts, strict=True)
        ]

    def _ask(self, image_HWC: NDArray[np.uint8], question: str) -> str:
        picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded_png(image_HWC)}"}}
        payload = {
            "model": self._model,
            "temperature": 0,
            "messages": [{"role": "user", "content": [{"type": "text", "text": question}, picture]}],
        }
        answer = post(f"{self._url}/v1/chat/completions", payload, timeout_s=self._timeout_s, key=_key())
        try:
            reply = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            reply = None
        if not isinstance(reply, str):
            raise ValueError(f"{self._url} answered without a message: {_start_of(answer)}")
        return reply


class ChatOcrScorer(ChatScorer):
    """Has a vision-language model read the image, and compares that with the prompt's quoted target."""

    def __init__(self, url: str, *, model: str = "", timeout_s: float = 60.0, graded: bool = True) -> None:
        super().__init__(url, model=model, timeout_s=timeout_s, within=(0.0, 1.0))
        self._graded = graded

    def __call__(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[str]) -> list[float]:
        targets = [quoted_target(prompt) for prompt in prompts]
        texts = [self._ask(image, READ) for image in images_BHWC]
        return [ocr_score(text, target, graded=self._graded) for text, target in zip(texts, targets, strict=True)]

    def check(self, prompt: str) -> None:
        quoted_target(prompt)


def post(url: str, payload: Mapping[str, Any], *, timeout_s: float, key: str = "") -> dict[str, Any]:
    """Send JSON, and return the JSON object that came back.

    Raises:
        Refused: a 4xx that will not pass.
        Unreachable: nothing listens there, it says that it is busy, or it breaks the connection.
        OSError, ValueError: no answer in time, an error of the server's, or an answer that is no JSON object.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(payload).encode(), headers)
    until_s = time.monotonic() + timeout_s
    content = b""
    try:
        with OPENER.open(request, timeout=timeout_s) as answer:
            while chunk := answer.read1(1 << 16):
                content += chunk
                if time.monotonic() > until_s:  # each read has a time-out, all of them together have this one
                    raise TimeoutError(f"{url} was still answering after reward.timeout_s = {timeout_s:g} s")
                if len(content) > ANSWER_BYTES_MAX:
                    raise ValueError(f"{url} answered with more than {ANSWER_BYTES_MAX} bytes")
    except urllib.error.HTTPError as error:
        said = f"{url} answered {error.code} {error.reason}{_body_of(error)}"
        if error.code in BUSY:
            raise Unreachable(said) from None
        if 300 <= error.code < 400:
            raise Refused(f"{said}: it is at {error.headers.get('Location')}, so give that as reward.url") from None
        if 400 <= error.code < 500 and error.code not in AGAIN:
            raise Refused(said) from None
        raise OSError(said) from None
    except urllib.error.URLError as error:
        if _is_away(error.reason):
            kind = Broken if isinstance(error.reason, ConnectionResetError | BrokenPipeError) else Unreachable
            raise kind(f"{url} cannot be reached ({error.reason})") from None
        if isinstance(error.reason, TimeoutError):
            raise _late(url, timeout_s) from None
        raise OSError(f"{url} cannot be asked ({error.reason})") from None
    except TimeoutError as error:
        raise error if url in str(error) else _late(url, timeout_s) from None
    except ConnectionError as error:
        raise Broken(f"{url} broke the connection ({error})") from None
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{url} answered with no JSON object: {_start_of(content.decode(errors='replace'))}")
    return found


def _key() -> str:
    """The key that a chat server wants, or "".

    Raises:
        SpotlightError: it cannot be sent. It is not shown.
    """
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise SpotlightError(f"{KEY} holds more than letters and signs of a key, such as a second line: set it anew")
    return key


def _is_away(reason: object) -> bool:
    """Whether nothing is there, at least not yet: a machine that boots, a name that is not known yet."""
    return isinstance(reason, ConnectionError | socket.gaierror) or getattr(reason, "errno", None) in AWAY


def _late(url: str, timeout_s: float) -> TimeoutError:
    return TimeoutError(f"{url} did not answer within reward.timeout_s = {timeout_s:g} s")


def _body_of(error: urllib.error.HTTPError) -> str:
    """What an error's page says, from its start."""
    try:
        with error:
            text = error.read(SAID_MAX + 1).decode(errors="replace").strip()
    except (OSError, HTTPException):
        text = ""
    return f": {_start_of(text)}" if text else ""


def _start_of(answer: object) -> str:
    text = answer if isinstance(answer, str) else repr(answer)
    return text if len(text) <= SAID_MAX else f"{text[:SAID_MAX]}..."


def number_in(reply: str) -> float:
    """The score in a reply: JSON with a "score", or the only number there is.

    Raises:
        ValueError: there is none, or more than one.
    """
    if found := re.search(r"\{[^{}]*\}", reply):
        try:
            score = json.loads(found[0])["score"]
            if not isinstance(score, bool):
                return float(score)
        except (ValueError, KeyError, TypeError):
            pass
    numbers = re.findall(r"-?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?", reply)
    if len(numbers) != 1:
        raise ValueError(f"no single score in the reply {reply[:80]!r}")
    return float(numbers[0])


def encoded_png(image_HWC: NDArray[np.uint8]) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image_HWC).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def checked_url(url: str) -> str:
    """
    Raises:
        SpotlightError: it is no address, or holds a secret, which would be written down.
    """
    if "@" in url.partition("://")[2].partition("/")[0]:
        raise SpotlightError(
            "reward.url holds a user or a password, which would be written down: leave them out; 'chat' and 'chat-ocr' "
            f"take a key from {KEY}"
        )
    try:
        whole = bool(re.fullmatch(r"https?://[^/\s]\S*", url)) and urlsplit(url).port != 0
    except ValueError:  # a port that is no number
        whole = False
    if not whole:
        raise SpotlightError(f"reward.url = {url!r}: give the server's address, such as http://127.0.0.1:8000")
    return url.rstrip("/")
