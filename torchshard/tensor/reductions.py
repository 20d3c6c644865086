"""Reductions and softmax. Over the sharded dim they compute the whole tensor's result.

Over dims that are whole they are local and keep the mark. Over the sharded dim each combines
local statistics in the fewest collectives: sums are partials that are reduced, softmax
shares its maximum and its denominator, and top-k gathers k candidates a rank, never the tensor.
Half precision is summed in float32 and rounded once, as torch does on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torchshard.distributed import collectives, ops
from torchshard.layout import Ranges, ranges_of_lengths
from torchshard.tensor.sharded import (
    RULES,
    ShardedTensor,
    Sharding,
    asked,
    bound,
    expect_first,
    local_call,
    mark,
    mixes,
    rule,
    whole_shape,
    wrapped_dim,
)


def reduced_dims(x: ShardedTensor, dim: Any) -> list[int]:
    """Return the dims that a reduction names, from the front; all of them without one."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return list(range(x.dim()))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return [wrapped_dim(x, value) for value in dims]


def reduced_arguments(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *names: str,
) -> tuple[ShardedTensor, dict[str, Any]]:
    """Return the shard that is reduced, and the other arguments by name."""
    expect_first(func.__name__, args[0], [*args, *kwargs.values()])
    return args[0], dict(zip(names, args[1:], strict=False)) | kwargs


def mixes_sharded(name: str, x: ShardedTensor, dims: list[int]) -> bool:
    """Return whether `dims` hold the sharded one, and check that each index counts once."""
    if x.sharding.dim in dims and x.sharding.ranges.overlaps:
        raise mixes(
            name, x.sharding, "would count indices that several ranks hold twice"
        )
    return x.sharding.dim in dims


def marked_rest(
    result: Tensor, x: ShardedTensor, dims: list[int], keepdim: bool
) -> Tensor:
    """Mark what is left of `x` after `dims`, none of them sharded, were reduced."""
    gone = 0 if keepdim else sum(dim < x.sharding.dim for dim in dims)
    return mark(result, x.sharding.at(x.sharding.dim - gone))


def squeezed(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Return a result that still has the reduced dims as `keepdim` wants it."""
    return x if keepdim else x.squeeze(tuple(dims))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to sum in: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def torch_dtype(func: Callable[..., Any], x: ShardedTensor, *args: Any) -> torch.dtype:
    """Return the dtype of torch's own result, which autocast may choose."""
    example = local_call(func, (x.to_local().new_empty(1), *args), {})
    return cast(torch.dtype, example.dtype)


@rule(["sum", "mean"])
def _sum(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    dims = reduced_dims(x, named.get("dim"))
    keepdim = named.get("keepdim", False)
    if not mixes_sharded(func.__name__, x, dims):
        return marked_rest(local_call(func, args, kwargs), x, dims, keepdim)
    dtype = named.get("dtype") or torch_dtype(func, x)
    partial = local_call(torch.sum, (x, dims, keepdim), {"dtype": wide(dtype)})
    result = ops.reduce(partial, x.sharding.group)
    if func.__name__ == "mean":
        result = result / math.prod([whole_shape(x)[dim] for dim in dims])
    return result.to(dtype)


@rule(["norm", "vector_norm", "linalg_vector_norm"])
def _norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The p-norm: (sum |x|^p)^(1/p), or the largest |x| for p = inf."""
    first = "p" if func.__name__ == "norm" else "ord"
    x, named = reduced_arguments(func, args, kwargs, first, "dim", "keepdim")
    dims, keepdim = reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if not mixes_sharded("norm", x, dims):
        return marked_rest(local_call(func, args, kwargs), x, dims, keepdim)
    order = named.get(first, 2)
    order = 2 if order in (None, "fro") else order
    if not isinstance(order, int | float) or order <= 0:
        raise mixes("norm", x.sharding, f"of order {order!r} has no rule")
    dtype = named.get("dtype") or torch_dtype(func, x)
    magnitudes = x.to_local().to(wide(dtype)).abs()
    if order == float("inf"):
        largest = _whole_extreme(mark(magnitudes, x.sharding), dims, True)
        return squeezed(largest, dims, keepdim).to(dtype)
    # The slope of |x|^p at 0 is infinite for p < 1; torch's norm takes it for 0.
    own = root(magnitudes, 1 / order) if order < 1 else magnitudes.pow(order)
    powers = ops.reduce(own.sum(dims, True), x.sharding.group)
    return squeezed(root(powers, order), dims, keepdim).to(dtype)


@rule(["linalg_norm"])
def _linalg_norm(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The norm of vectors, or of a matrix the root of its elements' squares."""
    kwargs = dict(kwargs)
    x = args[0] if args else kwargs.pop("A")
    order, dim, keepdim = bound(args[1:], kwargs, ord=None, dim=None, keepdim=False)
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    is_vector = len(dims) == 1
    if not is_vector and order not in (None, "fro"):
        raise mixes("norm", x.sharding, f"of order {order!r} of a matrix has no rule")
    order = order if is_vector and order is not None else 2
    dtype = kwargs.get("dtype")
    norm = torch.linalg.vector_norm
    return cast(Tensor, asked(norm, x, order, dim, keepdim, dtype=dtype))


@rule(["_foreach_norm"])
def _norms(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    order = kwargs.get("ord", args[1] if len(args) > 1 else 2)
    return tuple(torch.linalg.vector_norm(x, order) for x in args[0])


@rule(["_foreach_mul_"])
def _scale(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Scale by a number, as torch's clipping does."""
    return local_call(func, args, kwargs)


@rule(["_amp_foreach_non_finite_check_and_unscale_"])
def _unscale(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Unscale the shards; what is infinite on one rank is found on all: one all-reduce."""
    grads, found = args[:2]
    local_call(func, args, kwargs)
    groups = {x.sharding.group for x in grads if isinstance(x, ShardedTensor)}
    for group in groups:
        found.copy_(collectives.all_reduce(found, group, "max"))


@rule(["normalize"])
def _normalize(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Divide by max(p-norm, eps): over the sharded dim with the whole's norm, one all-reduce."""
    x, named = reduced_arguments(func, args, kwargs, "p", "dim", "eps")
    dim = wrapped_dim(x, named.get("dim", 1))
    if not mixes_sharded("normalize", x, [dim]):
        return mark(local_call(func, args, kwargs), x.sharding)
    norm = _norm(torch.norm, (x, named.get("p", 2.0), dim, True), {})
    length = ops.copy(norm.clamp_min(named.get("eps", 1e-12)), x.sharding.group)
    return mark(x.to_local() / length, x.sharding)


def root(powers: Tensor, order: float) -> Tensor:
    """Return `powers ** (1 / order)`, whose gradient at 0 is 0, as that of torch's norms."""
    nothing = powers == 0
    return torch.where(nothing, 0, torch.where(nothing, 1, powers).pow(1 / order))


@rule(["amax", "amin"])
def _amax(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    dims, keepdim = reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if not mixes_sharded(func.__name__, x, dims):
        return marked_rest(local_call(func, args, kwargs), x, dims, keepdim)
    if 0 in [whole_shape(x)[dim] for dim in dims]:
        return cast(Tensor, local_call(func, args, kwargs))  # torch's own error
    best = _whole_extreme(x, dims, func.__name__ == "amax")
    return squeezed(best, dims, keepdim)


class _Picked(torch.autograd.Function):
    """The extreme that the ranks agreed on; its gradient goes to who holds it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, best: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return best.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.saved_tensors[0], None, None


def _whole_extreme(x: Tensor, dims: list[int], largest: bool) -> Tensor:
    """Return the extreme over `dims`, kept; ties share the gradient evenly, as in torch.

    The ranks' extremes are gathered and not reduced: a reduction may lose a nan.
    """
    sharding = cast(ShardedTensor, x).sharding
    local = cast(ShardedTensor, x).to_local()
    own = _own_extreme(local.detach(), dims, largest)
    rows = collectives.stack(own, sharding.group)
    best = rows.amax(0) if largest else rows.amin(0)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return best
    ties = (local == best) | (local.isnan() & best.isnan())
    count = collectives.all_reduce(ties.sum(dims, keepdim=True), sharding.group)
    share = ties.to(local.dtype) / count
    return cast(Tensor, _Picked.apply(local, best, share))  # type: ignore[no-untyped-call] # torch's


def _own_extreme(local: Tensor, dims: list[int], largest: bool) -> Tensor:
    """Return the shard's extreme over `dims`, kept; of an empty shard the neutral value."""
    if all(local.shape[dim] for dim in dims):
        return (local.amax if largest else local.amin)(dims, keepdim=True)
    shape = [1 if dim in dims else size for dim, size in enumerate(local.shape)]
    return local.new_full(shape, _neutral(local.dtype, largest))


def _neutral(dtype: torch.dtype, largest: bool) -> float:
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    if dtype == torch.bool:
        return not largest
    limits = torch.iinfo(dtype)
    return limits.min if largest else limits.max


def _highest(local: Tensor, dims: list[int], sharding: Sharding) -> Tensor:
    """Return the whole's maximum over `dims`, kept, to shift by: any nan shows in the sum."""
    own = _own_extreme(local.detach(), dims, True)
    return collectives.all_reduce(own, sharding.group, "max")


class _Softmax(torch.autograd.Function):
    """p = exp(x - max) / sum; dx = p (dp - total of p dp)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        group, dim = sharding.group, sharding.dim
        exponentials = (x - _highest(x, [dim], sharding)).exp_()
        partial = exponentials.sum(dim, keepdim=True)
        result = exponentials.div_(collectives.all_reduce(partial, group))
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        partial = (grad * result).sum(ctx.sharding.dim, keepdim=True)
        return result * (grad - ops.total(partial, ctx.sharding.group)), None


class _LogSoftmax(torch.autograd.Function):
    """y = x - max - log sum; dx = dy - exp(y) total of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        group, dim = sharding.group, sharding.dim
        shifted = x - _highest(x, [dim], sharding)
        partial = shifted.exp().sum(dim, keepdim=True)
        result = shifted.sub_(collectives.all_reduce(partial, group).log())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        partial = grad.sum(ctx.sharding.dim, keepdim=True)
        return grad - result.exp() * ops.total(partial, ctx.sharding.group), None


@rule(["softmax", "log_softmax"])
def _softmax(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Over the sharded dim: one all-reduce of the maximum, one of the denominator."""
    name = func.__name__
    x, named = reduced_arguments(func, args, kwargs, "dim")
    if named.get("dim") is None:
        raise mixes(name, x.sharding, "needs an explicit dim")
    dim = wrapped_dim(x, named["dim"])
    if not mixes_sharded(name, x, [dim]):
        return mark(local_call(func, args, kwargs), x.sharding)
    given = [named.get("dtype"), *args[2:]]
    dtypes = [value for value in given if isinstance(value, torch.dtype)]
    dtype = dtypes[0] if dtypes else torch_dtype(func, x, 0)
    function = _LogSoftmax if name == "log_softmax" else _Softmax
    local = x.to_local().to(wide(dtype))
    result = function.apply(local, x.sharding)  # type: ignore[no-untyped-call] # torch's
    return mark(result.to(dtype), x.sharding)


@rule(["logsumexp"])
def _logsumexp(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    dims, keepdim = reduced_dims(x, named.get("dim")), named.get("keepdim", False)
    if not mixes_sharded("logsumexp", x, dims):
        return marked_rest(local_call(func, args, kwargs), x, dims, keepdim)
    dtype = torch_dtype(func, x, 0)
    local = x.to_local().to(wide(dtype))
    highest = _highest(local, dims, x.sharding)
    base = torch.where(highest.isinf(), 0, highest)
    partial = (local - base).exp().sum(dims, keepdim=True)
    result = ops.reduce(partial, x.sharding.group).log() + base
    return squeezed(result, dims, keepdim).to(dtype)


@rule(["topk"])
def _topk(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    x, named = reduced_arguments(func, args, kwargs, "k", "dim", "largest", "sorted")
    dim = wrapped_dim(x, named.get("dim", -1))
    if not mixes_sharded("topk", x, [dim]):
        result = local_call(func, args, kwargs)
        return type(result)([mark(part, x.sharding) for part in result])
    return _whole_topk(x, named["k"], named.get("largest", True))


def _whole_topk(x: ShardedTensor, k: int, largest: bool) -> Any:
    """Return torch's (values, indices): every rank offers its k best, and all choose."""
    sharding, local = x.sharding, x.to_local()
    dim, group = sharding.dim, sharding.group
    num_best = [min(k, length) for length in sharding.ranges.lengths]
    values, places = first_topk(local, num_best[group.rank], dim, largest)
    candidates = ranges_of_lengths(num_best)
    all_values, all_indices = _candidates(values, places, candidates, sharding)
    all_indices, order = all_indices.sort(dim)
    best = all_values.gather(dim, order).sort(stable=True, dim=dim, descending=largest)
    chosen = best.indices.narrow(dim, 0, k)
    return torch.return_types.topk(
        (best.values.narrow(dim, 0, k), all_indices.gather(dim, chosen))
    )


def first_topk(
    x: Tensor, k: int, dim: int, largest: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the k best values, sorted, and their indices, the lowest of equal values.

    `torch.topk` takes any of equal values. Rows in which it had a choice are sorted instead;
    a compiled graph, which cannot look, leaves the choice to it.
    """
    if not k or torch.compiler.is_compiling():
        return x.topk(k, dim, largest)
    with torch.no_grad():
        indices = _first_indices(x.movedim(dim, -1), k, largest).movedim(-1, dim)
    return x.gather(dim, indices), indices


def _first_indices(x: Tensor, k: int, largest: bool) -> Tensor:
    """Return the places of the k best of the last dim, the lowest of equal values."""
    one_more = x.topk(min(k + 1, x.shape[-1]), -1, largest)
    indices, order = one_more.indices[..., :k].sort(-1)
    values = one_more.values[..., :k].gather(-1, order)
    order = values.sort(stable=True, dim=-1, descending=largest).indices
    indices = indices.gather(-1, order)
    if k < x.shape[-1]:
        had_choice = one_more.values[..., k - 1] == one_more.values[..., k]
        if had_choice.any():
            rows = x[had_choice].sort(stable=True, dim=-1, descending=largest)
            indices[had_choice] = rows.indices[..., :k]
    return indices


def _candidates(
    values: Tensor, places: Tensor, candidates: Ranges, sharding: Sharding
) -> tuple[Tensor, Tensor]:
    """Return every rank's best values and their whole indices.

    They stand in the order of the ranks and so, unless the dim is packed, of the indices.
    """
    dim, group = sharding.dim, sharding.group
    indices = _whole_indices(places, sharding)
    return (
        ops.gather(values, dim, ranges=candidates, group=group),
        ops.gather(indices, dim, ranges=candidates, group=group),
    )


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
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    dim, keepdim = named.get("dim"), named.get("keepdim", False)
    if dim is None:
        raise mixes(func.__name__, x.sharding, "needs an explicit dim")
    dim = wrapped_dim(x, dim)
    if not mixes_sharded(func.__name__, x, [dim]):
        return marked_rest(local_call(func, args, kwargs), x, [dim], keepdim)
    indices = _extreme(x, func.__name__ == "argmax")[1]
    return indices if keepdim else indices.squeeze(dim)


@rule(["max", "min"])
def _max(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    largest = func.__name__ == "max"
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if isinstance(other, Tensor):
        elementwise = torch.maximum if largest else torch.minimum
        return RULES[elementwise.__name__](elementwise, (args[0], other), {})
    x, named = reduced_arguments(func, args, kwargs, "dim", "keepdim")
    dim, keepdim = named.get("dim"), named.get("keepdim", False)
    if dim is None:
        return _amax(torch.amax if largest else torch.amin, (x,), {})
    dim = wrapped_dim(x, dim)
    return_type = getattr(torch.return_types, func.__name__)
    if not mixes_sharded(func.__name__, x, [dim]):
        result = local_call(func, args, kwargs)
        return return_type([marked_rest(part, x, [dim], keepdim) for part in result])
    pair = _extreme(x, largest)
    return return_type([part if keepdim else part.squeeze(dim) for part in pair])


def _extreme(x: ShardedTensor, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the largest (smallest) values along the sharded dim and their first indices."""
    sharding = x.sharding
    dim = sharding.dim
    num_best = [min(1, length) for length in sharding.ranges.lengths]
    local = x.to_local()
    if sharding.length or not sharding.ranges.size:
        values, places = (local.max if largest else local.min)(dim, keepdim=True)
    else:
        values, places = local, local.long()
    candidates = ranges_of_lengths(num_best)
    all_values, all_indices = _candidates(values, places, candidates, sharding)
    best = (all_values.amax if largest else all_values.amin)(dim, keepdim=True)
    holds_best = (all_values == best) | (all_values.isnan() & best.isnan())
    rivals = torch.where(holds_best, all_indices, sharding.ranges.size)
    indices, order = rivals.min(dim, keepdim=True)
    return all_values.gather(dim, order), indices
