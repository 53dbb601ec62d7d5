"""Gangs of real processes: shared forward passes, peers that are killed or halted, and joining anew."""

from __future__ import annotations

import ast
import inspect
import os
import re
import signal
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import torch
from diffusers.hooks import context_parallel
from diffusers.models import _modeling_parallel, attention_dispatch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from numpy.typing import NDArray
from torch import distributed

from gangs import (
    Member,
    ask,
    errors,
    flux_model,
    form,
    gradients,
    kept_for_backward,
    members,
    tiny_model,
    together,
    velocity,
)
from pipelines import tiny_flux
from runs import wait_for
from spotlight.device import sequence_parallel
from spotlight.device.sequence_parallel import REPLACED, Gang, GangBroken, _nccl, check_widths
from spotlight.records import SpotlightError

TOLERANCE = 1e-5
"""Of the largest value, between widths, whose sums are taken in other orders: some eighty float32 roundings. Three
layers and a guidance of 4 need about 12."""

HEADS, LATENT_TOKENS, TEXT_TOKENS = 4, 32, 8
"""Of the embedded model."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the gangs of these tests find their peers."""
    return tmp_path


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_a_gang_predicts_what_one_device_does_with_the_same_bits_on_all_ranks(
    folder: Path, width: int, lora: bool
) -> None:
    alone = velocity(tiny_model(lora=lora))

    with members(width, lora=lora) as gang:
        form(gang, folder, f"equal-{width}-{lora}")
        first, *others = together(gang, "velocity")

    assert difference(first, alone) <= TOLERANCE
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("width", [2, 4])
def test_a_gang_has_the_gradients_of_one_device_with_the_same_bits_on_all_ranks(
    folder: Path, width: int, checkpointed: bool
) -> None:
    alone = gradients(tiny_model(lora=True))

    with members(width, lora=True) as gang:
        form(gang, folder, "gradients")
        first, *others = together(gang, "gradients", checkpointed)
        again = together(gang, "gradients", checkpointed)[0]

    assert sum(abs(each).max() > 0 for each in alone) > 40
    largest = max(abs(each).max() for each in alone)
    assert all(abs(ours - theirs).max() <= TOLERANCE * largest for ours, theirs in zip(first, alone, strict=True))
    for other in (*others, again):
        assert all(np.array_equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


def test_a_gang_shares_the_backward_pass_of_flux(folder: Path, tmp_path: Path) -> None:
    checkpoint = str(tiny_flux(tmp_path / "flux"))
    alone = gradients(flux_model(checkpoint))

    with members(2) as gang:
        together(gang, "load_flux", checkpoint)
        form(gang, folder, "first")
        first, other = together(gang, "gradients", False)

    largest = max(abs(each).max() for each in alone)
    assert largest > 0
    assert all(abs(ours - theirs).max() <= TOLERANCE * largest for ours, theirs in zip(first, alone, strict=True))
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


def test_each_rank_keeps_its_share_of_the_activations(folder: Path) -> None:
    alone = kept_for_backward(tiny_model(lora=True))

    with members(4, lora=True) as gang:
        form(gang, folder, "activations")
        kept = together(gang, "kept_for_backward")

    assert max(kept) < 0.4 * alone  # what is the same for all tokens is kept by each


def difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float(abs(ours - theirs).max() / abs(theirs).max())


@pytest.mark.parametrize("width", [1, 2, 4])
def test_each_rank_computes_its_share_of_the_tokens(folder: Path, width: int) -> None:
    with members(width) as gang:
        form(gang, folder, f"shares-{width}")
        computed = together(gang, "tokens_computed")

    assert computed == [LATENT_TOKENS // width] * width


def test_members_of_one_gang_after_another_are_unchanged_and_unburdened(folder: Path) -> None:
    with members(4) as everyone:
        before = together(everyone, "velocity")
        burdens = []

        for turn, width in enumerate((4, 2, 4, 2, 4)):
            form(everyone[:width], folder, f"turns-{turn}")
            together(everyone[:width], "velocity")
            together(everyone[:width], "leave")
            burdens.append(settled_burden(everyone))

        after = together(everyone, "velocity")
    assert np.array_equal(before, after)
    assert burdens[-1] == burdens[0]


def settled_burden(gang: list[Member]) -> int:
    """Threads and open files of all members, once it has not changed for a while: groups go in the background."""
    seen: list[int] = []

    def is_settled() -> bool:
        seen.append(sum(together(gang, "belongings")))
        return len(set(seen[-10:])) == 1 and len(seen) >= 10

    wait_for(is_settled)
    return seen[-1]


def test_a_gang_of_one_meets_nobody(folder: Path) -> None:
    with members(1) as (member,):
        form([member], folder / "missing", "one")
        said = [*together([member], "agree", 3), *together([member], "broadcast", [[1.5]])]
        predicted = together([member], "velocity")

    assert said == [3, [[1.5]]]
    assert np.array_equal(predicted[0], velocity(tiny_model()))


def test_all_get_the_first_rank_s_tensor_and_the_largest_code(folder: Path) -> None:
    with members(3) as gang:
        form(gang, folder, "small-talk")
        for rank, member in enumerate(gang):
            member.ask("broadcast", [[rank, 1.5], [rank, 2.5]])
        shared = [member.answer() for member in gang]
        for member, code in zip(gang, (1, 7, 2), strict=True):
            member.ask("agree", code)
        agreed = [member.answer() for member in gang]

    assert shared == [[[0, 1.5], [0, 2.5]]] * 3
    assert agreed == [7] * 3


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_survivors_of_a_kill_in_mid_pass_go_on_in_a_narrower_gang(folder: Path, lost: int) -> None:
    with members(4) as gang:
        form(gang, folder, f"killed-{lost}")
        survivors = [member for member in gang if member is not gang[lost]]
        ask([gang[lost]], "velocity_until", signal.SIGKILL)
        ask(survivors, "velocity")
        broken = errors(survivors)

        together(survivors, "leave")
        form(survivors[:2], folder, f"killed-{lost}-narrower")
        predicted = together(survivors, "velocity")

    assert all(isinstance(error, GangBroken) for error in broken)
    assert np.array_equal(predicted[0], predicted[1])
    assert difference(predicted[0], predicted[2]) <= TOLERANCE
    assert np.array_equal(predicted[2], velocity(tiny_model()))


def test_a_halted_peer_holds_survivors_only_until_they_are_called_off(folder: Path) -> None:
    with members(4) as gang:
        form(gang, folder, "halted")
        survivors = gang[:3]
        ask(gang[3:], "velocity_until", signal.SIGSTOP)
        ask(survivors, "velocity")
        held = not any(member.answered(within_s=0.1) for member in survivors)

        for member in survivors:
            member.call_off()
        broken = errors(survivors)
        together(survivors, "leave")
        form(survivors[:2], folder, "halted-narrower")
        predicted = together(survivors, "velocity")

    assert held
    assert all("called off" in str(error) and isinstance(error, GangBroken) for error in broken)
    assert difference(predicted[0], predicted[2]) <= TOLERANCE
    assert np.array_equal(predicted[2], velocity(tiny_model()))


def test_joining_ends_when_called_off(folder: Path) -> None:
    with members(1) as (member,):
        member.ask("join", folder, "lonely", 0, 2)
        held = not member.answered(within_s=0.1)
        member.call_off()
        broken = errors([member])
        form([member], folder, "alone")

    assert held
    assert isinstance(broken[0], GangBroken)


@pytest.mark.parametrize("rank", [0, 1])
def test_joining_ends_at_its_timeout_when_a_peer_never_comes(folder: Path, rank: int) -> None:
    with members(1) as (member,):
        member.ask("join", folder, f"late-{rank}", rank, 2, 0.2)
        broken = errors([member])

    assert isinstance(broken[0], GangBroken)


def test_an_exchange_ends_at_its_timeout_when_nobody_calls_it_off(folder: Path) -> None:
    with members(2) as gang:
        for rank, member in enumerate(gang):
            member.ask("join", folder, "unwatched", rank, 2, 3.0)
        joined = errors(gang)
        ask(gang[1:], "velocity_until", signal.SIGSTOP)
        ask(gang[:1], "velocity")
        broken = errors(gang[:1])

    assert joined == [None, None]
    assert isinstance(broken[0], GangBroken)


def test_texts_that_cannot_be_shared_are_refused_before_anything_is_sent(folder: Path) -> None:
    with members(2) as gang:
        form(gang, folder, "odd")
        ask(gang, "pass_texts_of", 7)
        refused = errors(gang)
        evenly = together(gang, "pass_texts_of", 6)

    assert all(isinstance(error, SpotlightError) and "7 text tokens" in str(error) for error in refused)
    assert evenly == [None, None]


@pytest.mark.parametrize(
    ("width", "tokens", "text_tokens", "possible"),
    [
        (3, LATENT_TOKENS, TEXT_TOKENS, "1, 2, 4"),
        (8, LATENT_TOKENS, TEXT_TOKENS, "1, 2, 4"),
        (4, 30, TEXT_TOKENS, "1, 2"),
        (2, LATENT_TOKENS, 7, "1"),
    ],
)
def test_a_width_that_cannot_be_shared_is_refused_with_those_that_can(
    width: int, tokens: int, text_tokens: int, possible: str
) -> None:
    transformer = tiny_model().transformer

    with pytest.raises(SpotlightError, match=rf"gang of {width} .* among the widths {re.escape(possible)} \("):
        check_widths(transformer, tokens, text_tokens, (1, width))


def test_widths_that_divide_everything_are_accepted() -> None:
    check_widths(tiny_model().transformer, LATENT_TOKENS, TEXT_TOKENS, (1, 2, 4))


def test_the_members_of_a_gang_listen_on_loopback_alone(folder: Path) -> None:
    with members(2) as gang:
        form(gang, folder, "listening")
        listening = [
            connection.laddr.ip
            for member in gang
            for connection in psutil.Process(member.pid).net_connections("inet")
            if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
        ]

    assert listening == ["127.0.0.1"] * 2


def test_a_gang_that_is_left_leaves_no_file_behind(folder: Path) -> None:
    with members(2) as gang:
        during, after = [], []
        for turn in range(10):
            form(gang, folder, f"turn-{turn}")
            during += list(folder.iterdir())
            together(gang, "leave")
            after += list(folder.iterdir())

    assert during == [folder / f"turn-{turn}" for turn in range(10)]
    assert after == []


def test_a_gang_that_broke_leaves_no_file_behind(folder: Path) -> None:
    with members(3) as gang:
        form(gang, folder, "killed")
        ask(gang[:1], "velocity_until", signal.SIGKILL)
        ask(gang[1:], "velocity")
        errors(gang)
        together(gang[1:], "break_off")

        assert list(folder.iterdir()) == []


def test_a_gang_that_never_formed_leaves_no_file_behind(folder: Path) -> None:
    with members(1) as (member,):
        member.ask("join", folder, "lonely", 0, 2)
        wait_for((folder / "lonely").exists)
        member.call_off()
        errors([member])

        wait_for(lambda: not list(folder.iterdir()))


def test_what_a_killed_gang_left_does_not_confuse_the_next_one(folder: Path) -> None:
    with members(4) as gang:
        form(gang[:2], folder, "request.e1")
        for member in gang[:2]:
            member.end()

        form(gang[2:], folder, "request.e2")
        predicted = together(gang[2:], "velocity")

    assert np.array_equal(*predicted)
    assert (folder / "request.e1").exists()


# The contract with diffusers: what `device.sequence_parallel` replaces, or stands in for, is still what it was.


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (attention_dispatch._all_to_all_single, ["x", "group"]),
        (context_parallel.EquipartitionSharder.shard, ["tensor", "dim", "mesh"]),
        (context_parallel.EquipartitionSharder.unshard, ["tensor", "dim", "mesh"]),
        (context_parallel.apply_context_parallel, ["module", "parallel_config", "plan"]),
        (context_parallel.remove_context_parallel, ["module", "plan"]),
        (_modeling_parallel.ParallelConfig.setup, ["self", "rank", "world_size", "device", "mesh"]),
    ],
)
def test_diffusers_still_has_these_parameters(function: Callable[..., Any], parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters


def test_what_a_gang_replaces_is_back_in_its_place() -> None:
    names = [name for _, name, _ in REPLACED]

    assert names == ["_all_to_all_single", "dist", "EquipartitionSharder"]
    assert vars(attention_dispatch)["dist"] is distributed
    assert context_parallel.EquipartitionSharder.__module__ == context_parallel.__name__
    assert attention_dispatch._all_to_all_single.__module__ == attention_dispatch.__name__


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (attention_dispatch.TemplatedUlyssesAttention.forward, {"_all_to_all_single", "dist.all_gather"}),
        (
            context_parallel.ContextParallelSplitHook._prepare_cp_input,
            {"EquipartitionSharder.shard", "PartitionAnythingSharder.shard_anything"},
        ),
        (
            context_parallel.ContextParallelGatherHook.post_forward,
            {"EquipartitionSharder.unshard", "PartitionAnythingSharder.unshard_anything"},
        ),
    ],
)
def test_diffusers_still_communicates_through_these_names_only(function: Callable[..., Any], names: set[str]) -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(function)))

    called = {ast.unparse(node.func) for node in ast.walk(source) if isinstance(node, ast.Call)}

    communicating = re.compile(r"_?all_|.*(dist|funcol|distributed|Sharder)\.")
    assert {name for name in called if communicating.match(name)} == names


def test_nccl_neither_ends_the_process_nor_blocks_it_whatever_the_machine_has_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read by torch as a group is made."""
    settings = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")
    for name in settings:
        monkeypatch.setenv(name, "1")

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            self.told = [os.environ[name] for name in settings]

    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)

    assert _nccl(cast("Any", None), 0, 2, timedelta(seconds=1)).told == ["0", "0"]


def test_why_the_members_of_a_gang_cannot_be_connected_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is given to others, and the reason would be lost with the gang."""

    def refuse(*_: object) -> None:
        raise RuntimeError("NCCL error: unhandled system error\nLast error: no room in /dev/shm")

    monkeypatch.setattr(Gang, "_meet", lambda *_: {b"cpu"})
    monkeypatch.setattr(sequence_parallel, "_gloo", refuse)
    facts: dict[str, Any] = {
        "rank": 0,
        "width": 2,
        "device": torch.device("cpu"),
        "called_off": lambda: None,
        "timeout_s": 60.0,
    }

    with pytest.raises(GangBroken), Gang(None, meeting=folder / "gang-a", name="a", **facts):
        pass

    assert caplog.messages == ["gang a, rank 0 of 2: NCCL error: unhandled system error"]


def test_diffusers_still_asks_only_this_of_a_mesh() -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(_modeling_parallel.ContextParallelConfig.setup)))

    asked = {node.func.attr for node in ast.walk(source) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}

    assert asked == {"_flatten", "get_local_rank"}


def test_diffusers_still_splits_the_transformer_at_these_places() -> None:
    rows, words = ContextParallelInput(split_dim=1, expected_dims=3), ContextParallelInput(split_dim=1, expected_dims=2)
    turns = ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)

    assert QwenImageTransformer2DModel._cp_plan == {
        "transformer_blocks.0": {"hidden_states": rows, "encoder_hidden_states": rows},
        "transformer_blocks.*": {"modulate_index": words, "encoder_hidden_states_mask": words},
        "pos_embed": {0: turns, 1: turns},
        "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
    }


def test_diffusers_still_tells_the_attention_of_a_gang_through_its_processor() -> None:
    transformer = tiny_model().transformer

    listening = [name for name, module in transformer.named_modules() if hasattr(module, "processor")]

    assert listening == [f"transformer_blocks.{n}.attn" for n in range(transformer.config["num_layers"])]
    parts: list[Any] = [transformer, *(transformer.get_submodule(name).processor for name in listening)]
    assert [part._parallel_config for part in parts] == [None] * len(parts)
