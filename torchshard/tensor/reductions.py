"""Reductions and softmax. Over the sharded dim they compute the whole tensor's result.

Over dims that are whole they are local and keep the mark. Over the sharded dim each combines
local statistics in the fewest collectives: sums are partials that are reduced, softmax
shares its maximum and its denominator, and top-k gathers k candidates a rank, never the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchshard.distributed import collectives, ops
from torchshard.layout import ranges_of_lengths
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    local_call,
    mark,
    mixes,
    rule,
)


def _reduced_dims(x: ShardedTensor, dim: Any) -> list[int]:
    if dim is None:
        return list(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [value % x.dim() for value in dims]


def _remaining(sharding: Sharding, dims: list[int], keepdim: bool) -> Sharding:
    gone = 0 if keepdim else sum(dim < sharding.dim for dim in dims)
    return sharding.at(sharding.dim - gone)


def _arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], *names: str
) -> tuple[ShardedTensor, dict[str, Any]]:
    """Return the tensor and the arguments by name; `axis` and `input` are torch's aliases."""
    named = dict(zip(names, args[1:], strict=False)) | kwargs
    if "axis" in named:
        named["dim"] = named.pop("axis")
    return args[0], named


@rule(["sum", "mean"])
def _sum(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = _arguments(args, kwargs, "dim", "keepdim")
    dims = _reduced_dims(x, named.get("dim"))
    keepdim = named.get("keepdim", False)
    if x.sharding.dim not in dims:
        result = local_call(func, args, kwargs)
        return mark(result, _remaining(x.sharding, dims, keepdim))
    dtype = named.get("dtype")
    partial = local_call(torch.sum, (x, dims, keepdim), {"dtype": dtype})
    result = ops.reduce(partial, x.sharding.group)
    if func.__name__ == "sum":
        return result
    count = 1
    for dim in dims:
        count *= x.size(dim)
    return result / count


@rule(["norm", "vector_norm", "linalg_vector_norm"])
def _norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The p-norm: (sum |x|^p)^(1/p), or the largest |x| for p = inf."""
    first = "p" if func.__name__ == "norm" else "ord"
    x, named = _arguments(args, kwargs, first, "dim", "keepdim")
    order = named.get(first, 2)
    dims, keepdim = _reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if x.sharding.dim not in dims:
        result = local_call(func, args, kwargs)
        return mark(result, _remaining(x.sharding, dims, keepdim))
    if order in (None, "fro"):
        order = 2
    if not isinstance(order, int | float) or order in (0, float("-inf")):
        raise mixes("norm", x.sharding, f"of order {order!r} has no rule")
    magnitudes = x.to_local().abs()
    if order == float("inf"):
        return _whole_amax(mark(magnitudes, x.sharding), dims, keepdim)
    powers = magnitudes.pow(order).sum(dims, keepdim)
    return ops.reduce(powers, x.sharding.group).pow(1 / order)


@rule(["amax", "amin"])
def _amax(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = _arguments(args, kwargs, "dim", "keepdim")
    dims, keepdim = _reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if x.sharding.dim not in dims:
        result = local_call(func, args, kwargs)
        return mark(result, _remaining(x.sharding, dims, keepdim))
    if func.__name__ == "amin":
        return -_whole_amax(-x, dims, keepdim)
    return _whole_amax(x, dims, keepdim)


def _whole_amax(x: Any, dims: list[int], keepdim: bool) -> Tensor:
    """Return the maximum over `dims`; ties share the gradient evenly, as in torch.amax."""
    local = x.to_local()
    best = _max_over_ranks(local, dims, x.sharding)
    if not local.requires_grad:
        return best if keepdim else _squeezed(best, dims)
    ties = (local == best).to(local.dtype)
    count = collectives.all_reduce(ties.sum(dims, keepdim=True), x.sharding.group)
    finite = torch.where(ties.bool(), local, 0)
    share = (finite * ties / count).sum(dims, keepdim=True)
    result = ops.reduce(share, x.sharding.group)
    return result if keepdim else _squeezed(result, dims)


def _squeezed(x: Tensor, dims: list[int]) -> Tensor:
    return x.squeeze(tuple(dims))


def _max_over_ranks(local: Tensor, dims: list[int], sharding: Sharding) -> Tensor:
    """Return the whole's maximum over `dims`, kept, without gradient; any shard may be empty."""
    local = local.detach()
    lowest = _lowest(local.dtype)
    if local.shape[sharding.dim] == 0:
        shape = [1 if dim in dims else n for dim, n in enumerate(local.shape)]
        best = local.new_full(shape, lowest)
    else:
        best = local.amax(dims, keepdim=True)
    return collectives.all_reduce(best, sharding.group, "max")


def _lowest(dtype: torch.dtype) -> float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


@rule(["softmax", "log_softmax", "_softmax", "_log_softmax"])
def _softmax(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Over the sharded dim: one all-reduce of the maximum, one of the denominator."""
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None:
        raise mixes(func.__name__, x.sharding, "needs an explicit dim")
    if dim % x.dim() != x.sharding.dim:
        return mark(local_call(func, args, kwargs), x.sharding)
    dtype = kwargs.get("dtype") or next(
        (value for value in args[2:] if isinstance(value, torch.dtype)), None
    )
    local = x.to_local() if dtype is None else x.to_local().to(dtype)
    shifted, denominator = _exponentials(local, x.sharding)
    if "log" in func.__name__:
        return mark(shifted - denominator.log(), x.sharding)
    return mark(shifted.exp() / denominator, x.sharding)


def _exponentials(local: Tensor, sharding: Sharding) -> tuple[Tensor, Tensor]:
    """Return `x - max` of this shard and the whole's sum of its exponentials."""
    shifted = local - _max_over_ranks(local, [sharding.dim], sharding)
    partial = shifted.exp().sum(sharding.dim, keepdim=True)
    return shifted, ops.total(partial, sharding.group)


@rule(["logsumexp"])
def _logsumexp(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = _arguments(args, kwargs, "dim", "keepdim")
    dims, keepdim = _reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if x.sharding.dim not in dims:
        result = local_call(func, args, kwargs)
        return mark(result, _remaining(x.sharding, dims, keepdim))
    local = x.to_local()
    best = _max_over_ranks(local, dims, x.sharding)
    partial = (local - best).exp().sum(dims, keepdim=True)
    result = ops.reduce(partial, x.sharding.group).log() + best
    return result if keepdim else _squeezed(result, dims)


@rule(["topk"])
def _topk(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    x, named = _arguments(args, kwargs, "k", "dim", "largest", "sorted")
    dim = named.get("dim", -1) % x.dim()
    if dim != x.sharding.dim:
        result = local_call(func, args, kwargs)
        return type(result)([mark(part, x.sharding) for part in result])
    return _whole_topk(x, named["k"], named.get("largest", True))


def _whole_topk(x: ShardedTensor, k: int, largest: bool) -> Any:
    """Return torch's (values, indices): every rank offers its k best, and all choose.

    The candidates stand in the order of their whole indices, so that ties fall as they do on
    the whole tensor wherever torch itself prefers the earlier index.
    """
    sharding, local = x.sharding, x.to_local()
    dim, group = sharding.dim, sharding.group
    num_best = [min(k, length) for length in sharding.ranges.lengths]
    values, places = local.topk(num_best[group.rank], dim, largest)
    indices = _whole_indices(places, sharding)
    candidates = ranges_of_lengths(num_best)
    all_values = ops.gather(values, dim, ranges=candidates, group=group)
    all_indices = ops.gather(indices, dim, ranges=candidates, group=group)
    best, order = all_values.topk(k, dim, largest)
    return torch.return_types.topk((best, all_indices.gather(dim, order)))


def _whole_indices(places: Tensor, sharding: Sharding) -> Tensor:
    """Return the indices in the whole dim of local `places`."""
    bounds = sharding.ranges.per_rank[sharding.group.rank]
    if not bounds:
        return places
    spans = [torch.arange(start, stop, device=places.device) for start, stop in bounds]
    return torch.cat(spans)[places]


@rule(["argmax", "argmin"])
def _argmax(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = _arguments(args, kwargs, "dim", "keepdim")
    dim, keepdim = named.get("dim"), named.get("keepdim", False)
    if dim is None:
        raise mixes(func.__name__, x.sharding, "needs an explicit dim")
    if dim % x.dim() != x.sharding.dim:
        result = local_call(func, args, kwargs)
        return mark(result, _remaining(x.sharding, [dim % x.dim()], keepdim))
    indices = _extreme(x, func.__name__ == "argmax")[1]
    return indices if keepdim else indices.squeeze(dim)


@rule(["max", "min"])
def _max(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    x, named = _arguments(args, kwargs, "dim", "keepdim")
    dim, keepdim = named.get("dim"), named.get("keepdim", False)
    largest = func.__name__ == "max"
    if dim is None:
        sign = 1 if largest else -1
        return sign * _whole_amax(sign * x, _reduced_dims(x, None), False)
    if isinstance(dim, Tensor):
        raise mixes(func.__name__, x.sharding, "of two tensors is maximum or minimum")
    return_type = getattr(torch.return_types, func.__name__)
    if dim % x.dim() != x.sharding.dim:
        result = local_call(func, args, kwargs)
        sharding = _remaining(x.sharding, [dim % x.dim()], keepdim)
        return return_type([mark(part, sharding) for part in result])
    pair = _extreme(x, largest)
    return return_type([part if keepdim else part.squeeze(dim) for part in pair])


def _extreme(x: ShardedTensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the largest (smallest) values along the sharded dim and their first indices."""
    sharding = x.sharding
    dim, group = sharding.dim, sharding.group
    num_best = [min(1, length) for length in sharding.ranges.lengths]
    local = x.to_local()
    if num_best[group.rank]:
        values, places = (local.max if largest else local.min)(dim, keepdim=True)
    else:
        values, places = local, local.long()
    candidates = ranges_of_lengths(num_best)
    indices = _whole_indices(places, sharding)
    all_values = ops.gather(values, dim, ranges=candidates, group=group)
    all_indices = ops.gather(indices, dim, ranges=candidates, group=group)
    best, order = (all_values.max if largest else all_values.min)(dim, keepdim=True)
    return best, all_indices.gather(dim, order)
