"""Shards set to their part of what a function puts into the whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.initializer import Part, StreamInitializer
from torchshard.tensor.sharded import Sharding

FILLS = frozenset(
    """
    uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_
    """.split()
)
_STREAMED = frozenset(["uniform_", "normal_"])
"""Fills whose numbers for a tensor are those of its chunks, one after the other."""


class _Fill(StreamInitializer):
    """The numbers of one of torch's random fills."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def draw(self, buffer: Tensor) -> None:
        self.func(buffer, *self.args, **self.kwargs)


@torch.no_grad()
def fill_in_stream(
    func: Callable[..., Any],
    shard: Tensor,
    sharding: Sharding,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Set a plain shard to its part of the whole's numbers, drawn on the CPU in chunks.

    `func` is a random fill whose numbers for a tensor are those of its chunks, one after the
    other.
    """
    bounds = sharding.ranges.per_rank[sharding.group.rank]
    part = Part(_whole_shape(shard, sharding), sharding.dim, bounds)
    _Fill(func, args, kwargs).fill(shard, part)


@torch.no_grad()
def fill_as_whole(
    func: Callable[..., Any],
    shard: Tensor,
    sharding: Sharding,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Set a plain shard to its part of a whole tensor that `func` fills in place, on the CPU."""
    values = torch.empty(_whole_shape(shard, sharding), dtype=shard.dtype)
    func(values, *args, **kwargs)
    place = (sharding.dim, sharding.ranges, sharding.group)
    shard.copy_(collectives.own_shard(values, *place))


def filled(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the shard that a random fill was given, with this rank's part of the whole's."""
    shard, *rest = args
    fill = fill_in_stream if func.__name__ in _STREAMED else fill_as_whole
    fill(func, shard.to_local(), shard.sharding, *rest, **kwargs)
    return shard


def initialised(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the shard that a function of `torch.nn.init` was given, set as the whole would be."""
    kwargs = dict(kwargs)
    shard, *rest = (kwargs.pop("tensor"), *args) if "tensor" in kwargs else args
    fill_as_whole(func, shard.to_local(), shard.sharding, *rest, **kwargs)
    return shard


def _whole_shape(shard: Tensor, sharding: Sharding) -> tuple[int, ...]:
    shape = list(shard.shape)
    shape[sharding.dim] = sharding.ranges.size
    return tuple(shape)
