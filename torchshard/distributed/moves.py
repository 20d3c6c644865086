"""The autograd of the ops: one function, and the table of what goes back for what goes forth.

The forward of each move is a raw collective, the backward another move, so that double
backward works. Arguments have been checked and dims are counted from the front; `ops.py` does
both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.distributed.agreement import expect_alike, is_debugging
from torchshard.distributed.groups import ShardGroup
from torchshard.distributed.running import where_it_runs
from torchshard.distributed.transforms import expect_no_transform
from torchshard.layout import Ranges


class _Pair(NamedTuple):
    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, *place: Any) -> Tensor:
        ctx.name, ctx.place = name, place
        if _is_checked(name, place):
            ctx.where = where_it_runs()
        return _MOVES[name].forward(x, *place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if _is_checked(ctx.name, ctx.place):
            what = f"backward of the {ctx.name}{getattr(ctx, 'where', '')}"
            expect_alike(what, {"the gradient": grad}, ctx.place[-1])
        moved = _MOVES[ctx.name].backward(grad, *ctx.place)
        return moved, None, *(None for _ in ctx.place)


_TO_WHOLE = frozenset(["reduce", "gather"])
"""Moves whose result all ranks read alike, so that what comes back is whole too."""


def _is_checked(name: str, place: tuple[Any, ...]) -> bool:
    return name in _TO_WHOLE and is_debugging(place[-1])


def move(name: str, x: Tensor, *place: Any) -> Tensor:
    """Return `x` moved as the table says; `place` is what the move's functions take."""
    expect_no_transform(f"A move between ranks ({name})", x)
    return cast(Tensor, _Move.apply(x, name, *place))


def _alias(x: Tensor, *place: Any) -> Tensor:
    return x.view_as(x)


def _own_copy(x: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    own = collectives.own_shard(x, dim, ranges, group)
    return own.clone(memory_format=torch.contiguous_format)


def _copied(grad: Tensor, group: ShardGroup) -> Tensor:
    # As it is: autograd may keep a view for itself and add to it, not a shared tensor.
    return move("copy", grad, group) if torch.is_grad_enabled() else grad


def _gathered(grad: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    name = "sum_shards" if ranges.overlaps else "gather"
    return move(name, grad, dim, ranges, group)


def _all_gathered(grad: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    if ranges.overlaps:
        return move("copy", move("sum_shards", grad, dim, ranges, group), group)
    return move("all_gather", grad, dim, ranges, group)


def _kept(grad: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    """Return the shard's gradient of a gather: where ranges overlap, only one holder's."""
    if not ranges.overlaps:
        return grad
    return grad * collectives.kept_mask(ranges, group, grad.dim(), dim, grad.device)


def _kept_slice(grad: Tensor, *place: Any) -> Tensor:
    return _kept(move("scatter", grad, *place), *place)


def _kept_sum(grad: Tensor, *place: Any) -> Tensor:
    return _kept(move("reduce_scatter", grad, *place), *place)


def _held_sum(grad: Tensor, *place: Any) -> Tensor:
    return move("scatter", move("sum_shards", grad, *place), *place)


def _sent_back(
    grad: Tensor,
    split_dim: int,
    split: Ranges,
    join_dim: int,
    join: Ranges,
    group: ShardGroup,
) -> Tensor:
    return move("all_to_all", grad, join_dim, join, split_dim, split, group)


_MOVES = {
    "copy": _Pair(_alias, lambda grad, group: move("reduce", grad, group)),
    "reduce": _Pair(collectives.all_reduce, _copied),
    "scatter": _Pair(_own_copy, _gathered),
    "gather": _Pair(collectives.all_gather, _kept_slice),
    # Shards that overlap -> whole, adding what several ranks hold.
    "sum_shards": _Pair(
        collectives.sum_into_whole, lambda grad, *place: move("scatter", grad, *place)
    ),
    "all_gather": _Pair(collectives.all_gather, _kept_sum),
    "reduce_scatter": _Pair(collectives.reduce_scatter, _all_gathered),
    "all_to_all": _Pair(collectives.all_to_all, _sent_back),
    "sum_over_holders": _Pair(_alias, _held_sum),
    "scale_grad": _Pair(_alias, lambda grad, factor: grad * factor),
}
