"""Raw collectives: out of place, on any dim, for any strides. No autograd here.

Every function allocates its result and never writes to its argument. A group of one does
no work. Ranges say what each rank holds, so unequal shards are padded to the longest and
trimmed again: one collective each, whatever the sizes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torchshard.distributed.agreement import expect_same_call
from torchshard.distributed.groups import ShardGroup
from torchshard.layout import Ranges

ReduceOp: TypeAlias = Literal["sum", "max"]

# Both were renamed in torch 2.13; the old names serve torch 2.6 to 2.12.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def all_reduce(x: Tensor, group: ShardGroup, op: ReduceOp = "sum") -> Tensor:
    """Return the sum (or maximum) of `x` over the ranks, on every rank."""
    if group.size == 1:
        return x
    expect_same_call(f"all_reduce ({op})", x, group)
    result = x.clone(memory_format=torch.contiguous_format)
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    dist.all_reduce(result, op=reduce_op, group=group.process_group)
    return result


def broadcast(x: Tensor, group: ShardGroup, source: int = 0) -> Tensor:
    """Return rank `source`'s `x`, on every rank; `source` is a rank of the group."""
    if group.size == 1:
        return x
    expect_same_call(f"broadcast from {source}", x, group)
    result = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(result, group=group.process_group, group_src=source)
    return result


def stack(x: Tensor, group: ShardGroup) -> Tensor:
    """Return every rank's `x`, of one shape everywhere, along a new first dim."""
    if group.size == 1:
        return x.unsqueeze(0)
    expect_same_call("all_gather", x, group)
    rows = x.contiguous().reshape(1, -1)
    result = rows.new_empty(group.size, rows.shape[1])
    _all_gather_single(result, rows, group=group.process_group)
    return result.reshape(group.size, *x.shape)


def own_shard(x: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    """Return this rank's part of the whole `x` along `dim`. Moves no data between ranks."""
    return take(x, dim, ranges.per_rank[group.rank])


def take(x: Tensor, dim: int, bounds: tuple[tuple[int, int], ...]) -> Tensor:
    """Return the given half-open index ranges of `dim`, one after the other."""
    parts = [x.narrow(dim, start, stop - start) for start, stop in bounds]
    if not parts:
        return x.narrow(dim, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def all_gather(x: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    """Return the whole tensor of which each rank holds the shard `x` along `dim`.

    Where ranges overlap, the holders' values must agree; the last holder's are kept.
    """
    if group.size == 1 and ranges.is_contiguous:
        return x
    dim %= x.dim()
    lengths = ranges.lengths
    shards = stack(_padded(x, dim, max(lengths)), group)
    if ranges.is_contiguous:
        if dim == 0 and min(lengths) == max(lengths):
            return shards.flatten(0, 1)
        trimmed = [shards[r].narrow(dim, 0, n) for r, n in enumerate(lengths)]
        return torch.cat(trimmed, dim)
    whole = x.new_empty(_with_size(x, dim, ranges.size))
    for rank, bounds in enumerate(ranges.per_rank):
        _put(whole, shards[rank], dim, bounds)
    return whole


def reduce_scatter(x: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    """Return this rank's shard along `dim` of the sum of the whole `x` over the ranks."""
    if group.size == 1:
        return own_shard(x, dim, ranges, group)
    dim %= x.dim()
    rows = _rows_by_rank(x, dim, ranges)
    expect_same_call("reduce_scatter", rows, group)
    result = rows.new_empty(rows[0].numel())
    _reduce_scatter_single(result, rows.flatten(), group=group.process_group)
    length = ranges.length(group.rank)
    return result.reshape(rows.shape[1:]).narrow(dim, 0, length).contiguous()


def _rows_by_rank(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Return each rank's part of `x`, padded to the longest, along a new first dim."""
    lengths = ranges.lengths
    if dim == 0 and ranges.is_contiguous and min(lengths) == max(lengths):
        return x.reshape(len(lengths), lengths[0], *x.shape[1:])
    shards = [
        _padded(take(x, dim, part), dim, max(lengths)) for part in ranges.per_rank
    ]
    return torch.stack(shards)


def all_to_all(
    x: Tensor,
    split_dim: int,
    split_ranges: Ranges,
    join_dim: int,
    join_ranges: Ranges,
    group: ShardGroup,
) -> Tensor:
    """Swap the dim that is spread: whole on `split_dim`, a shard on `join_dim`, to the reverse.

    Every rank sends to rank r the part of `split_dim` that r owns, and lays what it
    receives along `join_dim`.
    """
    if group.size == 1:
        return x
    split_dim, join_dim = split_dim % x.dim(), join_dim % x.dim()
    longest_split, longest_join = max(split_ranges.lengths), max(join_ranges.lengths)
    sent = [
        _padded(
            _padded(take(x, split_dim, part), split_dim, longest_split),
            join_dim,
            longest_join,
        )
        for part in split_ranges.per_rank
    ]
    rows = torch.stack(sent)
    expect_same_call("all_to_all", rows, group)
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group.process_group)
    own = received.narrow(split_dim + 1, 0, split_ranges.length(group.rank))
    whole = own.new_empty(_with_size(own[0], join_dim, join_ranges.size))
    for rank, bounds in enumerate(join_ranges.per_rank):
        _put(whole, own[rank], join_dim, bounds)
    return whole


def _with_size(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x
    missing = x.new_zeros(_with_size(x, dim, length - x.shape[dim]))
    return torch.cat([x, missing], dim)


def _put(
    whole: Tensor, shard: Tensor, dim: int, bounds: tuple[tuple[int, int], ...]
) -> None:
    """Copy `shard` into the index ranges `bounds` of the freshly allocated `whole`."""
    offset = 0
    for start, stop in bounds:
        length = stop - start
        whole.narrow(dim, start, length).copy_(shard.narrow(dim, offset, length))
        offset += length


def kept_mask(
    ranges: Ranges, group: ShardGroup, num_dims: int, dim: int, device: torch.device
) -> Tensor:
    """Return which indices of this rank's shard `all_gather` keeps, shaped to multiply it."""
    keeper = torch.empty(ranges.size, dtype=torch.int64, device=device)
    for rank, bounds in enumerate(ranges.per_rank):
        for start, stop in bounds:
            keeper[start:stop] = rank
    shape = [1] * num_dims
    shape[dim] = -1
    return (own_shard(keeper, 0, ranges, group) == group.rank).reshape(shape)


def sum_into_whole(x: Tensor, dim: int, ranges: Ranges, group: ShardGroup) -> Tensor:
    """Return the whole tensor with the shards of all ranks added where they overlap."""
    dim %= x.dim()
    whole = x.new_zeros(_with_size(x, dim, ranges.size))
    offset = 0
    for start, stop in ranges.per_rank[group.rank]:
        part = x.narrow(dim, offset, stop - start)
        whole.narrow(dim, start, stop - start).add_(part)
        offset += stop - start
    return all_reduce(whole, group)
