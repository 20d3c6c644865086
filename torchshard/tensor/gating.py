"""Activations that are not elementwise: glu, and prelu with a slope for each channel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torchshard.tensor.operands import Labels
from torchshard.tensor.products import product
from torchshard.tensor.sharded import (
    bound,
    local_call,
    mark,
    mixes,
    rule,
    whole_shape,
    wrapped_dim,
)


@rule(["glu"])
def _glu(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Multiply the first half of a dim by the sigmoid of the second: two blocks, if divided."""
    x, dim = bound(args, kwargs, input=None, dim=-1)
    sharding = x.sharding
    if wrapped_dim(x, dim) != sharding.dim:
        return mark(local_call(func, (x, dim), {}), sharding)
    half = sharding.ranges.size // 2
    gate = sharding.ranges.within(0, half)
    if gate != sharding.ranges.within(half, 2 * half) or sharding.ranges.size % 2:
        raise mixes(
            "glu",
            sharding,
            "needs the two indices that it multiplies on one rank: divide the layer that"
            " made it in 2 blocks",
        )
    return mark(local_call(func, (x, dim), {}), sharding.held(gate))


@rule(["prelu"])
def _prelu(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Multiply what is negative by one slope, or by that of its channel, dim 1."""
    x, weight = bound(args, kwargs, input=None, weight=None)
    labels: Labels = tuple(range(x.dim()))
    each = x.dim() > 1 and whole_shape(weight).numel() > 1
    slopes = ((1,) if each else ("slope",))[: weight.dim()]
    return product(
        "prelu",
        func,
        (x, weight),
        (labels, slopes),
        labels,
        check=lambda divided: divided.expect_not("prelu", _ONE_SLOPE),
    )


_ONE_SLOPE: dict[Hashable, str] = {"slope": "has one slope for all channels"}
