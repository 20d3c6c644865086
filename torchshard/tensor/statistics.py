"""Reductions beside sums and extremes: any, all, counts, products, variances, medians.

Over dims that are whole they are local and keep the mark. Over the sharded dim each combines
what the ranks have in one collective; those that would need the whole dim raise.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torchshard.distributed import collectives, ops
from torchshard.layout import ranges_of_lengths
from torchshard.tensor.norms import shared_moments
from torchshard.tensor.reductions import (
    marked_rest,
    mixes_sharded,
    reduced_arguments,
    reduced_dims,
    root,
    squeezed,
    torch_dtype,
    wide,
)
from torchshard.tensor.sharded import (
    RULES,
    ShardedTensor,
    asked,
    local_call,
    mark,
    mixes,
    rule,
    whole_shape,
    wrapped_dim,
)


@rule(["any", "all"])
def _any(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return whether one element, or every one, is not zero."""
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    dims, keepdim = reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if x.sharding.dim not in dims:
        return marked_rest(local_call(func, args, kwargs), x, dims, keepdim)
    own = local_call(func, (x, dims, True), {})
    is_all = func.__name__ == "all"
    sought = (own == 0 if is_all else own != 0).to(torch.uint8)
    found = collectives.all_reduce(sought, x.sharding.group, "max") != 0
    return squeezed((found != is_all).to(own.dtype), dims, keepdim)


@rule(["count_nonzero", "nansum", "nanmean"])
def _of_counted(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Sum what counts: what is not zero, or not nan."""
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    local, name = x.to_local(), func.__name__
    if name == "count_nonzero":
        counts = mark((local != 0).long(), x.sharding)
        return cast(Tensor, RULES["sum"](torch.sum, (counts,), named))
    numbers = mark(torch.where(local.isnan(), 0, local), x.sharding)
    total = cast(Tensor, RULES["sum"](torch.sum, (numbers,), named))
    if name == "nansum":
        return total
    counts = mark((~local.isnan()).to(local.dtype), x.sharding)
    number = RULES["sum"](torch.sum, (counts,), named)
    return cast(Tensor, asked(torch.div, total, number))


@rule(["prod"])
def _prod(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Multiply: over the sharded dim the ranks' products, gathered, are multiplied."""
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    dims, keepdim = reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if not mixes_sharded("prod", x, dims):
        return marked_rest(local_call(func, args, kwargs), x, dims, keepdim)
    dtype = named.get("dtype") or torch_dtype(func, x)
    own = x.to_local()
    if len(dims) == 1:
        own = own.prod(dims[0], dtype=wide(dtype))
    else:
        own = own.prod(dtype=wide(dtype))
    each = ranges_of_lengths([1] * x.sharding.group.size)
    rows = ops.gather(own.unsqueeze(0), 0, ranges=each, group=x.sharding.group)
    result = rows.prod(0).to(dtype)
    return result.unsqueeze(dims[0]) if keepdim else result


@rule(["var", "std", "var_mean", "std_mean"])
def _variance(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Mean squares about the mean, over n - correction; 1 unless another is given."""
    x, named = _variance_arguments(func, args, kwargs)
    name, dims = func.__name__, reduced_dims(x, named["dim"])
    keepdim = named["keepdim"]
    if not mixes_sharded(name, x, dims):
        call = getattr(torch, name)
        result = local_call(call, (x,), {**named, "dim": dims})
        if isinstance(result, Tensor):
            return marked_rest(result, x, dims, keepdim)
        return tuple(marked_rest(part, x, dims, keepdim) for part in result)
    local = x.to_local()
    mean, variance = shared_moments(
        local.to(wide(x.dtype)), dims, x.sharding, grad="whole"
    )
    number = prod([whole_shape(x)[dim] for dim in dims])
    divisor = max(number - named["correction"], 0)
    variance = variance * (number / divisor) if divisor else variance * number / 0.0
    spread = root(variance, 2) if name.startswith("std") else variance
    spread = squeezed(spread, dims, keepdim).to(x.dtype)
    if name.endswith("_mean"):
        return spread, squeezed(mean, dims, keepdim).to(x.dtype)
    return spread


def _variance_arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ShardedTensor, dict[str, Any]]:
    """Return the shard, and dim, correction and keepdim, of torch's several forms."""
    names: tuple[str, ...] = ("dim", "unbiased", "keepdim")
    if len(args) == 2 and isinstance(args[1], bool):
        names = ("unbiased",)
    x, named = reduced_arguments(func, args, kwargs, *names)
    unbiased = named.get("unbiased", True)
    correction = named.get("correction", 1 if unbiased else 0)
    return x, {
        "dim": named.get("dim"),
        "correction": 1 if correction is None else correction,
        "keepdim": named.get("keepdim", False),
    }


_ORDERED = ["median", "nanmedian", "mode", "kthvalue", "aminmax"]


@rule(_ORDERED)
def _ordered(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Values and their places along a dim that is whole."""
    name = func.__name__
    first = ("k",) if name == "kthvalue" else ()
    x, named = reduced_arguments(func, args, kwargs, *first, "dim", "keepdim")
    dim = named.get("dim", -1 if name in ("mode", "kthvalue") else None)
    if dim is None or wrapped_dim(x, dim) == x.sharding.dim:
        raise mixes(name, x.sharding, "would compare all of it")
    dims = [wrapped_dim(x, dim)]
    result = local_call(func, args, kwargs)
    keepdim = named.get("keepdim", False)
    return type(result)([marked_rest(part, x, dims, keepdim) for part in result])
