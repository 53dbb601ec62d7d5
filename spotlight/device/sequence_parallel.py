"""One request on several devices: the processes of a gang share its tokens, layer by layer.

The split is diffusers' own context parallelism (Ulysses). Only its transport is replaced, for as
long as the gang lasts: every exchange starts at once, is polled, and is given up when the gang is
called off, so that no lost or halted peer, and no lost host, ever blocks a survivor.

- The members of a gang are processes of one node, and each is in one gang at a time.
- torch's default process group is neither used nor made: a collective that bypasses the gang fails at once.
- Everything is sent as an all-to-all, so each survivor waits on the lost peer itself and notices.
- Backward passes are shared as forward ones are: each rank has the part of a gradient that comes from its own tokens,
  and `Gang.sum` adds them.
- All ranks get the same bits.
- NCCL connects GPUs. Gloo connects CPUs, and members that share one GPU (through the host: slow, but it works).

Shapes: W ranks, N latent tokens, T text tokens.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from diffusers.hooks import context_parallel
from diffusers.models import attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from torch import Tensor, distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]  # documented, though not in its __all__

from spotlight.records import SpotlightError

logger = logging.getLogger("spotlight.gang")

POLL_S = 2e-4
"""Between two looks at an exchange: short beside a layer of a tiny model, and nearly free to wait with."""

MEET_POLL_S = 2e-3
"""Between two looks for the other ranks: they may be a model's loading time away, and each look opens a file."""

GONE_TIMEOUT = timedelta(seconds=1)
"""How long a store waits for its file to come back after another rank has removed it."""

RUN_AHEAD = 8
"""Exchanges that the host may queue ahead of its GPU: enough to hide launches, and few enough for the launch queue. If
that were full, the host would block where nothing can call it off."""

LOOPBACK = "127.0.0.1"
"""Where gloo's members meet, whatever the machine's name resolves to: a gang never spans nodes."""


class GangBroken(Exception):
    """A peer is gone, or the gang was called off: leave it; the work is placed anew."""


def check_widths(
    transformer: Any, tokens: int, text_tokens: int, widths: Iterable[int], setting: str = "strategy.widths"
) -> None:
    """Refuse widths that do not split heads, latent tokens and text tokens evenly.

    Args:
        setting: where the widths are set; for the error.

    Raises:
        SpotlightError: a width does not, or diffusers cannot split this transformer; the text says which widths do.
    """
    wide = [width for width in widths if width > 1]
    if wide and transformer._cp_plan is None:
        raise SpotlightError(
            f"a gang of {_listed(wide)} cannot share a forward pass: diffusers has no plan for splitting a "
            f"{type(transformer).__name__}; make {setting} 1"
        )
    heads = int(transformer.config["num_attention_heads"])
    common = math.gcd(heads, tokens, text_tokens)
    uneven = [width for width in wide if common % width]
    if uneven:
        possible = [width for width in range(1, common + 1) if common % width == 0]
        raise SpotlightError(
            f"a gang of {_listed(uneven)} cannot evenly share {heads} attention heads, {tokens} latent tokens and "
            f"{text_tokens} text tokens: choose among the widths {_listed(possible)} ({setting})"
        )


class Gang:
    """This process's membership in one gang; inside ``with``, the transformer's passes are shared, both ways.

    Any method may raise `GangBroken`, as may the forward passes; after that only leaving is of use. The same
    process may then join another gang. A gang of one has no peers and joins nothing.

    Args:
        meeting: file through which the ranks find each other, made by the first that comes and removed when the gang is
            left. The same for all members, never used before, in a directory where only this user may write.
        name: of the gang, for messages: say, its id and its epoch.
        called_off: asked while waiting; returns why to leave the gang, or None.
        timeout_s: longest wait for a peer, when joining and in an exchange.
        share: makes the context in which the gang shares the transformer's passes; by default, diffusers' split.
    """

    def __init__(
        self,
        transformer: Any,
        *,
        meeting: Path,
        name: str,
        rank: int,
        width: int,
        device: torch.device,
        called_off: Callable[[], str | None],
        timeout_s: float,
        share: Share | None = None,
    ) -> None:
        assert 0 <= rank < width, f"rank {rank} of {width}"
        self.name, self.rank, self.width = name, rank, width
        self._transformer = transformer
        self._share = share or _shared
        self._meeting = meeting
        self._device = device
        self._called_off = called_off
        self._timeout_s = timeout_s
        self._backend: Any = None
        self._queues = False
        """Whether exchanges are queued on the GPU, which the host may be ahead of: NCCL's are."""
        self._started: deque[tuple[Callable[[], bool], Any]] = deque()
        self._exits = ExitStack()

    def __enter__(self) -> Gang:
        if self.width > 1:
            with ExitStack() as exits:
                self._backend = self._join()
                exits.push(self._leave)
                exits.enter_context(self._share(self._transformer, self))
                self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exits.__exit__(kind, error, trace)

    @property
    def meeting(self) -> Path:
        return self._meeting

    @property
    def device(self) -> torch.device:
        return self._device

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, on every rank; the other ranks pass any tensor of its shape, type and device."""
        if self.width == 1:
            return x
        return self.exchange(self._to_each(x.to(self._device)))[0].to(x.device)

    def agree(self, code: int) -> int:
        """The largest code that any rank gave."""
        if self.width == 1:
            return code
        codes_W = torch.full((self.width,), code, dtype=torch.int64, device=self._device)
        return int(self.exchange(codes_W).max())

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The parts of all ranks, joined along a dimension in the order of ranks."""
        return torch.cat(tuple(self.exchange(self._to_each(x))), dim)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, added in the order of ranks: the same bits on each."""
        if self.width == 1:
            return x
        parts = self.exchange(self._to_each(x.to(self._device)))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(x.device)

    def exchange(self, x: Tensor, *, ahead: int = 0) -> Tensor:
        """Row r goes to rank r; row r of the result came from rank r.

        Args:
            x: shape (W, ...), on the gang's device.
            ahead: most exchanges that may be unfinished on return; the GPU waits for them, the host does not.
        """
        self._raise_if_called_off()
        x = x.contiguous()
        y = torch.empty_like(x)
        try:
            work = self._backend.alltoall_base(y, x, [], [])
            if self._queues:
                work.wait()  # the stream waits, not the host
                arrived = torch.cuda.Event()
                arrived.record(torch.cuda.current_stream(self._device))
                self._started.append((arrived.query, work))  # the event, since NCCL also calls failed work completed
                self._finish(ahead)
            else:
                self._started.append((work.is_completed, work))
                self._finish(0)
        except RuntimeError as error:
            raise self._broken(_first_line(error)) from None
        return y

    def _to_each(self, x: Tensor) -> Tensor:
        return x.expand(self.width, *x.shape)

    def _finish(self, unfinished: int) -> None:
        """Wait until no more than ``unfinished`` exchanges are under way."""
        while len(self._started) > unfinished:
            is_done, work = self._started[0]
            self._wait(is_done, "an exchange")
            work.wait()  # gloo raises here what broke it
            self._started.popleft()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        until_s = time.monotonic() + self._timeout_s
        while not done():
            self._raise_if_called_off()
            if time.monotonic() > until_s:
                raise self._broken(f"{what} took longer than {self._timeout_s} s")
            time.sleep(POLL_S)

    def _raise_if_called_off(self) -> None:
        reason = self._called_off()
        if reason:
            raise self._broken(reason)

    def _broken(self, reason: str) -> GangBroken:
        return GangBroken(f"gang {self.name}, rank {self.rank} of {self.width}: {reason}")

    # Joining and leaving may block inside torch, so other threads do it.

    def _join(self) -> Any:
        joined: Future[Any] = Future()
        given_up = Event()

        def join() -> None:
            try:
                joined.set_result(self._connect(given_up))
            except Exception as error:
                self._meeting.unlink(missing_ok=True)
                joined.set_exception(error)

        Thread(target=join, name=f"join {self.name}", daemon=True).start()
        try:
            self._wait(joined.done, "joining")
            return joined.result()
        except RuntimeError as error:
            broken = self._broken(_first_line(error))
            logger.warning("%s", broken)  # a peer that was lost, or NCCL, which will not do it the next time either
            raise broken from None
        finally:
            given_up.set()

    def _connect(self, given_up: Event) -> Any:
        timeout = timedelta(seconds=self._timeout_s)
        store = FileStore(str(self._meeting), self.width)
        devices = self._meet(store, given_up)
        store.set_timeout(timeout)
        self._queues = self._device.type == "cuda" and len(devices) == self.width  # NCCL refuses two ranks on one GPU
        connect = _nccl if self._queues else _gloo
        backend = connect(store, self.rank, self.width, timeout)
        hello_W = torch.zeros(self.width, device=self._device)
        backend.alltoall_base(torch.empty_like(hello_W), hello_W, [], []).wait()  # only now NCCL connects
        store.set_timeout(GONE_TIMEOUT)  # the others leave when they are done, and the file goes with the first
        return backend

    def _meet(self, store: FileStore, given_up: Event) -> set[bytes]:
        """Wait until all ranks are here, so that connecting, which comes next, waits for no late rank.

        Returns:
            The names of their devices: fewer than ranks, if some share a GPU.
        """
        store.set_timeout(GONE_TIMEOUT)
        store.set(f"here-{self.rank}", _device_name(self._device))
        everyone = [f"here-{rank}" for rank in range(self.width)]
        while not store.check(everyone):
            if given_up.wait(MEET_POLL_S):
                raise RuntimeError("given up")
        return set(map(store.get, everyone))

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        backend, self._backend = self._backend, None
        self._meeting.unlink(missing_ok=True)  # first: a store that finds its file writes to it when destroyed
        closing = Thread(target=_close, args=(backend, kind is not None), name=f"leave {self.name}", daemon=True)
        del backend  # the thread's is the last reference: the destructor waits, up to the timeout, for what is stuck
        closing.start()


def _device_name(device: torch.device) -> str:
    """Tells the GPUs of a node apart, whichever of them each process sees."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else str(device)


def _gloo(store: FileStore, rank: int, width: int, timeout: timedelta) -> Any:
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=LOOPBACK)]
    options._threads = 1  # one exchange at a time
    options._timeout = timeout
    return gloo(store, rank, width, options)


def _nccl(store: FileStore, rank: int, width: int, timeout: timedelta) -> Any:
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else its watchdog ends the process
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "0"  # else the host waits where nothing can call it off
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return distributed.ProcessGroupNCCL(store, rank, width, options)


def _close(backend: Any, broken: bool) -> None:
    if broken:
        backend.abort()
    else:
        backend.shutdown()


Share = Callable[[Any, Gang], AbstractContextManager[None]]
"""``share(transformer, gang)``: a context in which the gang shares the transformer's passes."""

# What replaces parts of diffusers' context parallelism during a gang. The contract test watches both.


class _Mesh:
    """What diffusers asks of a device mesh; its process group is the gang."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang

    def __getitem__(self, names: str | tuple[str, ...]) -> _Mesh:
        return self

    def _flatten(self) -> _Mesh:
        return self

    def get_local_rank(self) -> int:
        return self._gang.rank

    def get_group(self) -> Gang:
        return self._gang


class _Gather(torch.autograd.Function):
    """All-gather. Its backward pass takes this rank's slice of the gradient, which is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, gang: Gang) -> Tensor:
        ctx.dim, ctx.gang = dim, gang
        return gang.gather(x, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].chunk(ctx.gang.width, ctx.dim)[ctx.gang.rank], None, None


class _Sharder:
    """Stands in for diffusers' `EquipartitionSharder`."""

    @staticmethod
    def shard(tensor: Tensor, dim: int, mesh: _Mesh) -> Tensor:
        gang = mesh.get_group()
        return tensor.chunk(gang.width, dim)[gang.rank]

    @staticmethod
    def unshard(tensor: Tensor, dim: int, mesh: _Mesh) -> Tensor:
        gathered: Tensor = _Gather.apply(tensor, dim, mesh.get_group())
        return gathered


def _all_to_all_single(x: Tensor, group: Gang) -> Tensor:
    return group.exchange(x, ahead=RUN_AHEAD)


def _all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Gang) -> None:
    tensor_list[:] = group.exchange(group._to_each(tensor), ahead=RUN_AHEAD)


REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (attention_dispatch, "_all_to_all_single", _all_to_all_single),
    (attention_dispatch, "dist", SimpleNamespace(all_gather=_all_gather)),
    (context_parallel, "EquipartitionSharder", _Sharder),
)
"""(module of diffusers, name in it, what it is during a gang)"""


@contextmanager
def _shared(transformer: Any, gang: Gang) -> Iterator[None]:
    """Inside, forward passes are shared by the gang; outside, the transformer is as it was."""
    assert transformer._parallel_config is None, "the transformer is in a gang already"
    config = ContextParallelConfig(ulysses_degree=gang.width)
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(gang.rank, gang.width, gang._device, mesh=_Mesh(gang))  # type: ignore[arg-type]
    plan: Any = transformer._cp_plan
    parts: list[Any] = [transformer, *(getattr(module, "processor", None) for module in transformer.modules())]
    with ExitStack() as undo:
        for owner, name, ours in REPLACED:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, ours)
        for part in parts:
            if hasattr(part, "_parallel_config"):
                undo.callback(setattr, part, "_parallel_config", None)
                part._parallel_config = parallel
        undo.callback(context_parallel.remove_context_parallel, transformer, plan)
        context_parallel.apply_context_parallel(transformer, config, plan)
        undo.callback(transformer.register_forward_pre_hook(_checker(gang.width), with_kwargs=True).remove)
        yield


def _checker(width: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    """A hook that checks the shapes of inputs: diffusers only warns of what it cannot split, and leaves it whole."""

    def check(transformer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, text = kwargs["hidden_states"], kwargs["encoder_hidden_states"]
        mask = kwargs.get("encoder_hidden_states_mask")  # of the families that mask padding
        assert x.ndim == text.ndim == 3, f"shapes {x.shape}, {text.shape}"
        assert mask is None or mask.ndim == 2, f"shape {mask.shape}"
        check_widths(transformer, x.shape[1], text.shape[1], [width])

    return check


def _listed(widths: Iterable[int]) -> str:
    return ", ".join(map(str, widths))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
