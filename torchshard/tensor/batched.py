"""Functions that are local as long as the sharded dim is one they treat as a batch.

Pools, resizing and shuffles of pixels take the last dims; functions of matrices the last two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torchshard.tensor.sharded import (
    ShardedTensor,
    expect_first,
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


_SHUFFLES = {
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), 3),
    **dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), 3),
}


@rule([*_POOLS, *_SHUFFLES, "interpolate"])
def _pool(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Pool over positions: the last one, two or three dims."""
    x, name = args[0], func.__name__
    expect_first(name, x, [*args, *kwargs.values()])
    num_dims = {**_POOLS, **_SHUFFLES}.get(name, x.dim() - 2)
    if x.sharding.dim >= x.dim() - num_dims:
        raise mixes(name, x.sharding, "pools over it" if name in _POOLS else "")
    result = _of_something(func, x, args, kwargs)
    if isinstance(result, Tensor):
        return mark(result, x.sharding)
    return tuple(mark(part, x.sharding) for part in result)


_MATRIX = """
    triu tril inverse linalg_inv linalg_inv_ex det linalg_det logdet slogdet linalg_slogdet
    linalg_cholesky linalg_cholesky_ex linalg_qr linalg_svdvals linalg_eigvalsh
    linalg_matrix_exp matrix_exp linalg_matrix_power matrix_power linalg_matrix_norm
    """.split()


@rule(_MATRIX)
def _matrix(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Functions of the matrices in the last two dims."""
    x, name = args[0], func.__name__
    expect_first(name, x, [*args, *kwargs.values()])
    if x.sharding.dim >= x.dim() - 2:
        raise mixes(name, x.sharding, "needs whole matrices")
    if name == "linalg_matrix_norm" and len(args) + len(kwargs) > 2:
        raise mixes(name, x.sharding, "of named dims has no rule")
    result = local_call(func, args, kwargs)
    if isinstance(result, Tensor):
        return mark(result, x.sharding)
    return type(result)([mark(part, x.sharding) for part in result])


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
