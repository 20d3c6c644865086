"""Functions that are local as long as the sharded dim is one they treat as a batch: pools, pad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchshard.tensor.sharded import (
    first_sharded,
    local_call,
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
    result = local_call(func, args, kwargs)
    if isinstance(result, Tensor):
        return mark(result, x.sharding)
    return tuple(mark(part, x.sharding) for part in result)


@rule(["pad"])
def _pad(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Pad dims that are whole."""
    x = args[0]
    padding = args[1] if len(args) > 1 else kwargs["pad"]
    if x.sharding.dim >= x.dim() - len(padding) // 2:
        raise mixes("pad", x.sharding, "would lengthen it")
    return mark(local_call(func, args, kwargs), x.sharding)
