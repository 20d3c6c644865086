"""Scans and sorts along a dim: running sums, products and extremes, differences.

Along a dim that is whole they are local. Along the sharded dim a running sum adds what the
ranks before hold, one all-gather of their totals; the others raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchshard.distributed import ops
from torchshard.layout import ranges_of_lengths
from torchshard.tensor.reductions import reduced_arguments, torch_dtype, wide
from torchshard.tensor.sharded import (
    Sharding,
    local_call,
    mark,
    mixes,
    rule,
    wrapped_dim,
)


@rule(["cumsum"])
def _cumsum(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = reduced_arguments(func, args, kwargs, "dim")
    dim = wrapped_dim(x, named["dim"])
    if dim != x.sharding.dim:
        return mark(local_call(func, args, kwargs), x.sharding)
    before = _ranks_before(x.sharding)
    dtype = named.get("dtype") or torch_dtype(func, x, 0)
    running = x.to_local().cumsum(dim, dtype=wide(dtype))
    own = x.to_local().sum(dim, dtype=wide(dtype)).unsqueeze(0)
    each = ranges_of_lengths([1] * x.sharding.group.size)
    totals = ops.all_gather(own, 0, ranges=each, group=x.sharding.group)
    earlier = totals[before].sum(0).unsqueeze(dim)
    return mark((running + earlier).to(dtype), x.sharding)


def _ranks_before(sharding: Sharding) -> list[int]:
    """Return the ranks that hold the indices before this rank's.

    Raises:
        ShardedOpError: If a rank holds several ranges, or several hold an index.
    """
    ranges, rank = sharding.ranges, sharding.group.rank
    if ranges.overlaps or any(len(bounds) > 1 for bounds in ranges.per_rank):
        why = "needs each rank to hold one range of it, of its own"
        raise mixes("cumsum", sharding, why)
    starts = [bounds[0][0] if bounds else -1 for bounds in ranges.per_rank]
    return [other for other, start in enumerate(starts) if 0 <= start < starts[rank]]


@rule(["cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "msort"])
def _along_whole(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    name = func.__name__
    x, named = reduced_arguments(func, args, kwargs, "dim")
    default = -1 if name in ("sort", "argsort") else 0
    dim = named.get("dim", default)
    if isinstance(dim, bool):  # sort(x, stable, dim) by position
        raise mixes(name, x.sharding, "takes `stable` by its name")
    if wrapped_dim(x, dim) == x.sharding.dim:
        raise mixes(name, x.sharding, "along it would need what other ranks hold")
    # Not the marked tensor: torch 2.13 gives cummax of nothing its input for a gradient.
    result = local_call(func, (x.to_local(), *args[1:]), kwargs)
    if isinstance(result, Tensor):
        return mark(result, x.sharding)
    return type(result)([mark(part, x.sharding) for part in result])
