"""How the layers of a LoRA compute beside a network in bfloat16; the weights that learn stay in float32.

peft would compute in the dtype of its own weights: a float32 copy of each layer's input, products without tensor cores,
and a sum that is rounded back. Here a layer rounds its two small matrices and computes in the network's dtype, as
training under autocast does. It is also what plain diffusers computes with an exported LoRA, which it reads in the
network's dtype: to the bit. Sampling and training compute alike.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor
from torch.nn import functional


def compute_in_the_networks_dtype(transformer: Any) -> None:
    """Replace how the LoRA layers of a network compute that has some, where peft would compute in float32."""
    for module in transformer.modules():
        if isinstance(module, Linear):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(layer: Linear, x: Tensor) -> Tensor:
    y: Tensor = layer.base_layer(x)
    if layer.disable_adapters or layer.merged:
        return y
    for name in layer.active_adapters:
        down, up = (_weight(matrices[name]).to(x.dtype) for matrices in (layer.lora_A, layer.lora_B))
        y = y + functional.linear(functional.linear(x, down), up) * layer.scaling[name]
    return y


def _weight(matrix: torch.nn.Module) -> Tensor:
    weight = matrix.weight
    assert isinstance(weight, Tensor)
    return weight
