"""Convolutions and transposed ones: channels, groups or the batch may be divided.

divided                              result
out channels: weight, bias           divided along its channels, local
in channels: x, weight               the ranks' sum in one all-reduce, the bias added once
groups: x, weight, bias alike        divided along its channels, local: whole groups a rank
batch: x                             divided along the batch, local
positions, or a kernel's             an error: a rank would need its neighbours' edges
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
from torch import Tensor
from torchshard.tensor.operands import Division, Labels, Units
from torchshard.tensor.products import product
from torchshard.tensor.sharded import RULES, ShardedTensor, bound, rule, whole_shape

_EDGES = "needs positions that neighbouring ranks hold"
_KERNEL = "needs the whole kernel at each position"
_WITHIN = "of several groups needs all channels of each; divide dim 0 of its weight"

_SETTINGS: dict[bool, dict[str, Any]] = {
    False: {"stride": 1, "padding": 0, "dilation": 1, "groups": 1},
    True: {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1},
}
"""What follows input, weight and bias, in torch's order; of transposed ones, under True."""
_KINDS = {
    f"conv{transpose}{num_dims}d": (num_dims, transpose != "")
    for transpose in ("", "_transpose")
    for num_dims in (1, 2, 3)
}
"""Number of a kernel's dims, and whether it is transposed."""


@rule(_KINDS)
def _convolution(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    name = func.__name__
    num_dims, transposed = _KINDS[name]
    settings = _SETTINGS[transposed]
    names: dict[str, Any] = {"input": None, "weight": None, "bias": None}
    x, weight, bias, *values = bound(args, kwargs, **names, **settings)
    given = dict(zip(settings, values, strict=True))
    *labels, output = _labels(x, weight, given["groups"], num_dims, transposed)

    def compute(x: Tensor, weight: Tensor, *bias: Tensor) -> Any:
        channels = labels[0][-num_dims - 1]
        if isinstance(channels, Units):
            given["groups"] = x.shape[-num_dims - 1] // channels.size
        own_bias = bias[0].flatten() if bias else None
        return func(x, weight, own_bias, **given)

    def check(divided: Division) -> None:
        divided.expect_not(name, _REFUSED)
        if divided.label != "batch":
            divided.expect_some(name)

    addend = None if bias is None else _before_positions(bias, num_dims)
    return product(
        name, compute, (x, weight), labels, output, addend=addend, check=check
    )


_POSITIONS = "first position", "second position", "third position"
_KERNEL_DIMS = "first of the kernel", "second of the kernel", "third of the kernel"
_REFUSED: dict[Hashable, str] = {
    **dict.fromkeys(_POSITIONS, _EDGES),
    **dict.fromkeys(_KERNEL_DIMS, _KERNEL),
    "within a group": _WITHIN,
}


def _labels(
    x: Tensor, weight: Tensor, groups: int, num_dims: int, transposed: bool
) -> tuple[Labels, Labels, Labels]:
    """Return the labels of the input, the weight and the output."""
    batch = ("batch",) * (x.dim() - num_dims - 1)
    positions, kernel = _POSITIONS[:num_dims], _KERNEL_DIMS[:num_dims]
    if groups == 1:
        channels: Labels = ("in", "out") if transposed else ("out", "in")
        return (
            (*batch, "in", *positions),
            (*channels, *kernel),
            (*batch, "out", *positions),
        )
    in_channels, rows = whole_shape(x)[-num_dims - 1], whole_shape(weight)[0]
    own_in, own_out = (
        Units("group", in_channels // groups),
        Units("group", rows // groups),
    )
    result = Units("group", whole_shape(weight)[1]) if transposed else own_out
    return (
        (*batch, own_in, *positions),
        (own_out, "within a group", *kernel),
        (*batch, result, *positions),
    )


def _before_positions(bias: Tensor, num_dims: int) -> Tensor:
    """Return the bias as it is added to an output, one value a channel."""
    shape = (-1, *[1] * num_dims)
    if isinstance(bias, ShardedTensor):
        return cast(Tensor, RULES["reshape"](torch.Tensor.reshape, (bias, shape), {}))
    return bias.reshape(shape)
