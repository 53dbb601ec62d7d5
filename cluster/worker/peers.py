"""Weights from worker to worker: ranges of the files that a node holds, asked for by the hash of their content.

Only bytes travel: nothing is pickled, no path is ever named, and who asks checks the whole file's hash.
It never decides who holds what, nor in which order holders are asked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from distributed import Worker

from spotlight.store.node import BLOCK_BYTES, Node, Source

READ_TIMEOUT_S = 10.0
"""Longest wait for one block: enough at 1 MB/s. A frozen holder costs this once."""

KNOCK_TIMEOUT_S = 2.0
"""Longest wait for a TCP connection, which the system accepts however busy the holder is."""

_HANDLER = "spotlight_read"


def serve(worker: Worker, node: Node) -> None:
    """Let other workers read what this worker's node holds."""

    async def read(sha256: str, offset: int, length: int) -> bytes | str:
        # A refusal is an answer: Dask would log an exception here, and pickle it.
        if offset < 0 or not 0 <= length <= BLOCK_BYTES:
            return f"a range has at most {BLOCK_BYTES} bytes, and {offset}, {length} was asked for"
        try:
            return await asyncio.to_thread(node.read, sha256, offset, length)
        except (OSError, ValueError) as error:
            return str(error)

    worker.handlers[_HANDLER] = read


def sources(worker: Worker, holders: Sequence[str]) -> list[Source]:
    """The workers at these addresses, in this order, as sources for `Node.bring`.

    They may be called from any thread but the worker's event loop, which does the transfer.
    """
    return [partial(_read, worker, holder) for holder in holders]


def _read(worker: Worker, holder: str, sha256: str, offset: int, length: int) -> bytes:
    async def ask() -> bytes | str:
        asked = getattr(worker.rpc(holder), _HANDLER)(sha256=sha256, offset=offset, length=length)
        return await asyncio.wait_for(asked, READ_TIMEOUT_S)

    try:
        if offset == 0:
            _knock(holder)
        answer = asyncio.run_coroutine_threadsafe(ask(), worker.loop.asyncio_loop).result()  # type: ignore[attr-defined]
    except TimeoutError:
        raise OSError(f"{holder}: no answer within {READ_TIMEOUT_S} s") from None
    except Exception as error:  # whatever a holder does, the next source is asked
        raise OSError(f"{holder}: {error}") from error
    if not isinstance(answer, bytes):
        raise OSError(f"{holder}: {answer or 'serves no weights'}")
    return answer


def _knock(holder: str) -> None:
    """Fails at once if the holder is gone, where Dask would try to connect again and again."""
    address = urlsplit(holder)
    socket.create_connection((address.hostname, address.port), KNOCK_TIMEOUT_S).close()
