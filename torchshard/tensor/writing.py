"""Writes into a part of a shard: `x[index] = value`, in place, with no collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.tensor.cutting import full_index, item_of_dim, slice_ends
from torchshard.tensor.elementwise import aligned
from torchshard.tensor.sharded import (
    RULES,
    ShardedTensor,
    Sharding,
    expect_first,
    local,
    local_call,
    rule,
)


@rule(["__setitem__"])
def _setitem(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Each rank writes what it holds of the part; of a plain value it takes its own part."""
    x, index, value = args
    parts = list(index) if isinstance(index, tuple) else [index]
    expect_first("indexing", x, [x, *parts, value])
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    is_number = not isinstance(value, Tensor) or not value.dim()
    if is_mask and is_number and index.dim() == x.dim():
        RULES["masked_fill_"](Tensor.masked_fill_, (x, index, value), {})
        return
    sharding = x.sharding
    if isinstance(index, Tensor | list) and is_number:
        _write_rows(x, torch.as_tensor(index, device=x.device), value)
        return
    items = full_index(x, index)
    items += [slice(None)] * (x.dim() - sum(item is not None for item in items))
    number = item_of_dim(items, sharding.dim)
    place = sum(not isinstance(item, int) for item in items[:number])
    is_one = isinstance(items[number], int)
    items[number], piece = _own_part(items[number], sharding)
    selected = local_call(Tensor.__getitem__, (x.to_local(), tuple(items)), {})
    if not isinstance(value, Tensor):
        selected.fill_(value)
        return
    while value.dim() > selected.dim() - is_one and value.shape[0] == 1:
        value = value.squeeze(0)  # torch lets a value have more dims of one in front
    back = place - selected.dim()
    if is_one and value.dim() >= -back:
        value = value.unsqueeze(back)
    selected.copy_(local(aligned("indexing", value, piece.at(back))))


def _write_rows(x: ShardedTensor, rows: Tensor, value: Any) -> None:
    """Set rows, named by ids or by a mask of the first dims, to a number."""
    own, sharding = x.to_local(), x.sharding
    is_mask = rows.dtype == torch.bool
    if is_mask and sharding.dim < rows.dim():
        place = (sharding.dim, sharding.ranges, sharding.group)
        rows = collectives.own_shard(rows, *place)
    elif sharding.dim == 0:
        named = rows.new_zeros(sharding.ranges.size, dtype=torch.bool)
        named[rows] = True
        rows = collectives.own_shard(named, 0, sharding.ranges, sharding.group)
    own[rows] = aligned("indexing", value, sharding.at(-1))


def _own_part(item: Any, sharding: Sharding) -> tuple[slice, Sharding]:
    """Return which of the local indices an item of the sharded dim names, and who has them.

    Raises:
        IndexError: If there is no such index, in torch's words.
    """
    ranges, size = sharding.ranges, sharding.ranges.size
    if isinstance(item, int):
        if not -size <= item < size:
            raise IndexError(
                f"index {item} is out of bounds for dimension {sharding.dim} with size"
                f" {size}"
            )
        start, stop = item % size, item % size + 1
    else:
        start, stop = slice_ends(item, sharding)
    piece = sharding.held(ranges.within(start, stop))
    first = ranges.within(0, start).length(sharding.group.rank)
    return slice(first, first + piece.length), piece
