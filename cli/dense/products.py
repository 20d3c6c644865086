"""Functions for forwards that meet shards: their source goes into generated files.

Each takes plain tensors for whole ones, and in a group of one, where nothing is marked, is the
function of torch that it stands for. A generated file holds those that its forward calls.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchshard as ts
from torch import Tensor
from torchshard.distributed import copy, reduce


def on_shards(
    function: Callable[..., Tensor], *args: Any, at: int, **options: Any
) -> Tensor:
    """Return `function` of this rank's shards: a shard along dim `at` of the result.

    For a function that computes every index of the sharded dim on its own.
    """
    shards = [arg for arg in args if isinstance(arg, ts.ShardedTensor)]
    if not shards:
        return function(*args, **options)
    held = shards[0].sharding
    own = [_own(arg, shards[0]) for arg in args]
    output = function(*own, **options)
    return ts.ShardedTensor.from_local(output, at, ranges=held.ranges, group=held.group)


def summed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return the ranks' sum of `function` of their shards.

    For a product that sums over the sharded dim.
    """
    shards = [arg for arg in args if isinstance(arg, ts.ShardedTensor)]
    if not shards:
        return function(*args)
    own = [_own(arg, shards[0]) for arg in args]
    return reduce(function(*own), shards[0].sharding.group)


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return F.linear, summed over sharded input features; the bias is added once."""
    output = summed(F.linear, input, weight)
    return output if bias is None else output + bias


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Return `table[index]` of a table whose rows are divided: each rank adds its own."""
    if not isinstance(table, ts.ShardedTensor):
        return table[index]
    held, rows = table.sharding, table.to_local()
    index = torch.where(index < 0, index + held.ranges.size, index)
    ts.expect_indices(index, held.ranges.size, "index")
    place = index - held.ranges.offset(held.group.rank)
    is_own = (place >= 0) & (place < held.length)
    # Foreign indices find a row of zeros behind the last: no shape depends on them.
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, 1))
    return reduce(padded[torch.where(is_own, place, held.length)], held.group)


def embedding(index: Tensor, table: Tensor) -> Tensor:
    """Return F.embedding of a table whose rows are divided."""
    return lookup(table, index)


def _own(value: Any, example: ts.ShardedTensor) -> Any:
    """Return a shard as a plain tensor, and a whole tensor as sharded compute reads it."""
    held = example.sharding
    if isinstance(value, ts.ShardedTensor):
        if value.sharding.ranges != held.ranges or value.sharding.group != held.group:
            raise ts.errors.ShardedOpError(
                f"Tensors divided as {value.sharding.ranges.lengths} and as"
                f" {held.ranges.lengths} meet. Pass torchshard.tensor.whole(x) for one."
            )
        return value.to_local()
    if isinstance(value, Tensor) and value.requires_grad:
        return copy(value, held.group)
    return value
