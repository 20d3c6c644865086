"""Functions that are local as long as the sharded dim is one they treat as a batch: pools, pad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torchshard.tensor.sharded import (
    ShardedTensor,
    first_sharded,
    mark,
    mixes,
    rule,
)

_POOLS = {
    f"{name}{num_dims}d{suffix}": num_dims
    for name in (
        "max_pool",
        "avg_pool",
        "adaptive_avg_pool",
        "adaptive_max_pool",
        "lp_pool",
    )
    for num_dims in (1, 2, 3)
    for suffix in ("", "_with_indices")
}


@rule(_POOLS)
def _pool(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Pool over positions: the last one, two or three dims."""
    x = first_sharded(args)
    num_dims = _POOLS[func.__name__]
    if x.sharding.dim >= x.dim() - num_dims:
        raise mixes(func.__name__, x.sharding, "pools over it")
    result = _of_something(func, x, args, kwargs)
    if isinstance(result, Tensor):
        return mark(result, x.sharding)
    return tuple(mark(part, x.sharding) for part in result)


def _of_something(
    func: Callable[..., Any],
    x: ShardedTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call `func` on the shard, which torch refuses without channels: then on one of zeros."""
    local, dim = x.to_local(), x.sharding.dim
    is_empty = x.sharding.length == 0
    if is_empty:
        shape = list(local.shape)
        shape[dim] = 1
        local = torch.cat([local, local.new_zeros(shape)], dim)
    args = tuple(local if value is x else value for value in args)
    result = func(*args, **kwargs)
    if not is_empty:
        return result
    return tree_map(lambda part: part.narrow(dim, 0, 0), result)


@rule(["pad"])
def _pad(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Pad dims that are whole."""
    x = args[0]
    padding = args[1] if len(args) > 1 else kwargs["pad"]
    if x.sharding.dim >= x.dim() - len(padding) // 2:
        raise mixes("pad", x.sharding, "would lengthen it")
    return mark(_of_something(func, x, args, kwargs), x.sharding)
