"""One request on several GPUs by xfuser's sequence parallelism, for whoever sets ``sp.backend = "xfuser"``.

Two members on one H100 predict what one GPU does; several GPUs are not verified. xfuser 0.7 cannot even be imported
where there is none (importing this file does not import it).

- xfuser keeps its groups in globals, and makes them of torch's default process group: each gang has a world of its own,
  and leaves none of it behind.
- Its transformer takes a mask and ignores it: it is given texts without their padding, or nothing.
- Its exchanges cannot be called off: a rank that loses a peer is freed when its engine process is ended
  (``cluster.hang_after_s``). The native backend notices at once.
- Forward passes only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from spotlight.device.sequence_parallel import Gang
from spotlight.records import SpotlightError

WAY_OUT = 'or set sp.backend = "native"'


def require(device: torch.device) -> None:
    """Check, before any gang is formed, that xfuser can be used.

    Raises:
        SpotlightError: it cannot, for the reason given.
    """
    if device.type != "cuda":
        raise SpotlightError(f'sp.backend = "xfuser" needs GPUs, and the model is on {device}: use GPUs, {WAY_OUT}')
    if find_spec("xfuser") is None:
        raise SpotlightError(
            f"sp.backend = \"xfuser\", which is not installed: pip install 'xfuser>=0.7,<0.8', {WAY_OUT}"
        )


@contextmanager
def shared(transformer: Any, gang: Gang) -> Iterator[None]:
    """Inside, forward passes are shared by the gang; outside, the transformer and xfuser are as they were."""
    from xfuser.model_executor.models.transformers.transformer_qwen import (
        xFuserQwenDoubleStreamAttnProcessor,
        xFuserQwenImageTransformerWrapper,
    )

    processor = xFuserQwenDoubleStreamAttnProcessor()
    replicates = "sp_replicated_text" in inspect.signature(processor.__call__).parameters
    whole = transformer.forward

    def forward(**arguments: Any) -> Any:
        assert not torch.is_grad_enabled(), "a gang's exchanges carry no gradients"
        given = without_padding(arguments)
        if given["encoder_hidden_states"].shape[1] % gang.width and not replicates:
            return whole(**arguments)  # each rank computes the whole pass: xfuser would pad the text
        with _processors(transformer, processor):
            return xFuserQwenImageTransformerWrapper.forward(transformer, **given)

    with _world(gang):
        transformer.forward = forward
        try:
            yield
        finally:
            del transformer.forward


def without_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """A pass's arguments with its texts cut to their unmasked tokens, and no mask.

    Raises:
        SpotlightError: the texts are of different lengths, so that cutting them is not enough.
    """
    mask_BT: Tensor | None = arguments.get("encoder_hidden_states_mask")
    if mask_BT is None:
        return arguments
    lengths_B = mask_BT.sum(1)
    length = int(lengths_B[0])
    if not bool((lengths_B == length).all()) or not bool(mask_BT[:, :length].all()):
        raise SpotlightError(
            f"xfuser ignores masks, and texts of {', '.join(map(str, lengths_B.tolist()))} tokens came in one batch: "
            f"give it texts of one length, {WAY_OUT}"
        )
    text_BTD = arguments["encoder_hidden_states"][:, :length]
    return arguments | {"encoder_hidden_states": text_BTD, "encoder_hidden_states_mask": None}


@contextmanager
def _processors(transformer: Any, processor: Any) -> Iterator[None]:
    with ExitStack() as undo:
        for block in transformer.transformer_blocks:
            undo.callback(setattr, block.attn, "processor", block.attn.processor)
            block.attn.processor = processor
        yield


@contextmanager
def _world(gang: Gang) -> Iterator[None]:
    """xfuser's groups, of this gang's members and nobody else."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
        runtime_state,
    )

    meeting = gang.meeting.with_name(f"{gang.meeting.name}.world")
    place = {"rank": gang.rank, "world_size": gang.width, "local_rank": gang.device.index or 0}
    try:
        init_distributed_environment(**place, distributed_init_method=f"file://{meeting}")
        initialize_model_parallel(ulysses_degree=gang.width)
        settings = xFuserArgs()
        settings.ulysses_degree, settings.attention_backend = gang.width, "SDPA"
        runtime_state._RUNTIME = _state(settings.create_config()[0])
        yield
    finally:
        runtime_state._RUNTIME = None
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
        _forget(parallel_state)
        meeting.unlink(missing_ok=True)


def _state(config: Any) -> Any:
    """xfuser's runtime state of a configuration. Without a pipeline, xfuser would assume one GPU, and refuse that."""
    from xfuser.core.distributed.runtime_state import ExternalRuntimeState, RuntimeState

    state = ExternalRuntimeState.__new__(ExternalRuntimeState)
    RuntimeState.__init__(state, config)
    return state


def _forget(parallel_state: Any) -> None:
    """Drop what xfuser's own clearing leaves: its group of all ranks, and yunchang's groups."""
    from yunchang.globals import PROCESS_GROUP

    parallel_state._DIT = None
    for name in ("ULYSSES_PG", "RING_PG"):
        setattr(PROCESS_GROUP, name, None)
