"""Real members of gangs: processes that are told what to do and can be killed or halted in the middle of it.

They are forked from one parent that has done the imports, as the engines of a node are.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from spotlight.device.sequence_parallel import Gang, GangBroken
from spotlight.rl.models import Loading, Model
from spotlight.rl.models.captured import compute_blocks_again
from spotlight.rl.models.flux import Flux
from spotlight.rl.models.tiny_text import HEIGHT_PX, WIDTH_PX, TinyText

NEVER_S = 3600.0
"""A timeout that no test lives to see: what ends earlier was ended by something else."""

TEXTS = ('a "47"', 'a "Hello 47"')
"""Of different lengths."""
ModelT = TypeVar("ModelT", bound=Model)

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["spotlight.device.sequence_parallel", "spotlight.rl.models.tiny_text"])


CPU = torch.device("cpu")


def tiny_model(*, lora: bool = False, device: torch.device = CPU) -> TinyText:
    """The embedded model; its LoRA, if asked for, is one that changes the output."""
    model = TinyText.load("", device, torch.float32)
    return _with_lora(model) if lora else model


def _with_lora(model: ModelT) -> ModelT:
    model.make_trainable(rank=4, alpha=0, seed=0)
    draw = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw).to(parameter.device)
    return model


@torch.no_grad()
def velocity(model: Model) -> NDArray[np.float32]:
    """One guided prediction for two samples, whose texts are of different lengths."""
    tokens, channels = model.latent_shape(HEIGHT_PX, WIDTH_PX)
    x_BNC = torch.randn(2, tokens, channels, generator=torch.Generator().manual_seed(2)).to(model.device)
    texts, levels_B = model.encode(TEXTS), torch.tensor([0.9, 0.3], device=model.device)
    size = {"height_px": HEIGHT_PX, "width_px": WIDTH_PX}
    return model.velocity(x_BNC, levels_B, texts, guidance=4.0, **size).cpu().numpy()


def flux_model(checkpoint: str) -> Model:
    """A tiny pipeline of FLUX with a LoRA that changes the output."""
    model = Flux.load(checkpoint, Loading(device=torch.device("cpu"), dtype=torch.float32))
    model.preload(TEXTS)
    return _with_lora(model)


def gradients(
    model: Model, gang: Gang | None = None, *, checkpointed: bool = False, fails: Callable[[], object] = bool
) -> list[NDArray[np.float32]]:
    """Of a loss of one prediction for two samples, for each parameter that is trained.

    Args:
        fails: is called between the prediction and its backward pass.
    """
    if checkpointed:
        compute_blocks_again(model.transformer)
    model.transformer.train(checkpointed)
    tokens, channels = model.latent_shape(HEIGHT_PX, WIDTH_PX)
    x_BNC, aim_BNC = torch.randn(2, 2, tokens, channels, generator=torch.Generator().manual_seed(2)).to(model.device)
    size = {"height_px": HEIGHT_PX, "width_px": WIDTH_PX}
    texts, levels_B = model.encode(TEXTS), torch.tensor([0.9, 0.3], device=model.device)
    for parameter in model.parameters():
        parameter.grad = None
    v_BNC = model.velocity(x_BNC, levels_B, texts, guidance=1.0, **size)
    fails()
    (v_BNC - aim_BNC).square().mean().backward()
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return [(gang.sum(each) if gang else each).cpu().numpy() for each in found]


def kept_for_backward(model: Model) -> int:
    """Values that a loss's backward keeps, the weights left out."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in model.transformer.state_dict(keep_vars=True).values()}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes() // x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gradients(model)
    return sum(kept.values())


def as_if_on_hosts(rank: int) -> None:
    """Let members share a GPU over NCCL, where there are too few: it refuses that to processes of one host only."""
    if torch.cuda.device_count() < 2:
        os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}


def wait_until_left() -> None:
    """A process that ends while a thread of it still leaves a gang is ended by torch's own threads."""
    for thread in threading.enumerate():
        if thread.name.startswith("leave "):
            thread.join()


class Member:
    """A process that can be in a gang. What `ask` started, `answer` waits for."""

    def __init__(self, *, lora: bool = False) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._off = CONTEXT.RawValue("b", 0)
        self._process = CONTEXT.Process(target=_live, args=(theirs, self._off, lora), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, what: str, *arguments: Any) -> None:
        """Begin what the method of `_Life` of that name does, not called off so far."""
        self._off.value = 0
        self._pipe.send((what, arguments))

    def answer(self) -> Any:
        """What it returned, or raise what it raised; EOFError if the process is gone."""
        value, error = self._pipe.recv()
        if error:
            raise error
        return value

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    def answered(self, within_s: float) -> bool:
        return self._pipe.poll(within_s)

    def call_off(self) -> None:
        self._off.value = 1

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


@contextmanager
def members(count: int, *, lora: bool = False) -> Iterator[list[Member]]:
    """So many fresh processes, killed at the end."""
    found = [Member(lora=lora) for _ in range(count)]
    try:
        yield found
    finally:
        for member in found:
            member.end()


def ask(gang: Sequence[Member], what: str, *arguments: Any) -> None:
    for member in gang:
        member.ask(what, *arguments)


def together(gang: Sequence[Member], what: str, *arguments: Any) -> list[Any]:
    """All do the same at the same time; what each returned."""
    ask(gang, what, *arguments)
    return [member.answer() for member in gang]


def errors(gang: Sequence[Member]) -> list[Exception | None]:
    """What each member's task raised."""

    def error_of(member: Member) -> Exception | None:
        try:
            member.answer()
        except Exception as error:
            return error
        return None

    return [error_of(member) for member in gang]


def form(gang: Sequence[Member], folder: Path, name: str) -> None:
    """The members join one gang, ranked in the order given."""
    for rank, member in enumerate(gang):
        member.ask("join", folder, name, rank, len(gang))
    for member in gang:
        member.answer()


class _Life:
    """What a member can be asked to do."""

    def __init__(self, off: Any, *, lora: bool) -> None:
        self._off = off
        self._model: Model = tiny_model(lora=lora)
        self._gang: Gang | None = None

    def join(self, folder: Path, name: str, rank: int, width: int, timeout_s: float = NEVER_S) -> None:
        gang = Gang(
            self._model.transformer,
            meeting=folder / name,
            name=name,
            rank=rank,
            width=width,
            device=torch.device("cpu"),
            called_off=lambda: "called off" if self._off.value else None,
            timeout_s=timeout_s,
        )
        self._gang = gang.__enter__()

    def leave(self) -> None:
        assert self._gang
        self._gang.__exit__(None, None, None)
        self._gang = None

    def break_off(self) -> None:
        """Leave because the gang broke."""
        assert self._gang
        self._gang.__exit__(GangBroken, GangBroken(), None)
        self._gang = None

    def velocity(self) -> NDArray[np.float32]:
        return velocity(self._model)

    def gradients(self, checkpointed: bool) -> list[NDArray[np.float32]]:
        return gradients(self._model, self._gang, checkpointed=checkpointed)

    def load_flux(self, checkpoint: str) -> None:
        """From now on, be one of FLUX."""
        self._model = flux_model(checkpoint)

    def kept_for_backward(self) -> int:
        return kept_for_backward(self._model)

    def velocity_until(self, end: int) -> NDArray[np.float32]:
        """Sends itself a signal in the middle of a forward pass."""
        middle = self._model.transformer.get_submodule("transformer_blocks.1")
        middle.register_forward_hook(partial(_raise_signal, end))
        return velocity(self._model)

    def tokens_computed(self) -> int:
        """Latent tokens of a sample that this process takes through a layer in the middle."""
        seen: list[int] = []
        layer = self._model.transformer.get_submodule("transformer_blocks.1.img_mlp")
        watch = layer.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[1]))
        velocity(self._model)
        watch.remove()
        return seen[0]

    def broadcast(self, values: Sequence[Sequence[float]]) -> list[list[float]]:
        assert self._gang
        return self._gang.broadcast(torch.tensor(values)).tolist()

    def agree(self, code: int) -> int:
        assert self._gang
        return self._gang.agree(code)

    @torch.no_grad()
    def pass_texts_of(self, tokens: int) -> None:
        """A forward pass whose texts have so many tokens."""
        self._model.transformer(
            hidden_states=torch.zeros(1, 32, 16),
            encoder_hidden_states=torch.zeros(1, tokens, 64),
            encoder_hidden_states_mask=torch.ones(1, tokens, dtype=torch.bool),
            timestep=torch.zeros(1),
            img_shapes=[[(1, 4, 8)]],
        )

    def belongings(self) -> int:
        """How many threads and open files it has."""
        return sum(len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd"))


def _raise_signal(number: int, *_: object) -> None:
    os.kill(os.getpid(), signal.Signals(number))


def _live(pipe: Connection, off: Any, lora: bool) -> None:
    torch.set_num_threads(1)
    life = _Life(off, lora=lora)
    while True:
        what, arguments = pipe.recv()
        value, raised = None, None
        try:
            value = getattr(life, what)(*arguments)
        except Exception as error:
            raised = error
        pipe.send((value, raised))
