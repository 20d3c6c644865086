"""Elementwise functions: the result is sharded as the arguments are.

A plain tensor beside a shard is whole. Where it lacks the sharded dim or has size 1 there, it
is copied into the sharded compute (its gradient is summed over the ranks); where it has the
whole size, this rank's part is taken. A plain tensor of the shard's own size is an error: its
mark was lost, and nobody can tell what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.distributed import collectives, ops
from torchshard.distributed.random import shard_rng
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.tensor.compiler import seen_in_graphs
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    bound,
    expect_first,
    first_sharded,
    local_call,
    mark,
    mixes,
    recalled,
    rule,
    whole_shape,
)

_NAMES = """
    abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square
    reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc sigmoid
    arcsin arccos arctan arcsinh arccosh arctanh erfinv lgamma digamma sinc i0
    deg2rad rad2deg signbit
    logit sign sgn floor ceil round trunc frac clamp clip clamp_min clamp_max nan_to_num
    isnan isinf isfinite relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign
    hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink threshold _threshold log_sigmoid
    add sub subtract mul multiply div divide true_divide floor_divide fmod remainder pow
    float_power rsub maximum minimum fmax fmin atan2 hypot xlogy copysign logaddexp logaddexp2
    heaviside lerp addcmul addcdiv where
    masked_fill eq ne lt le gt ge logical_and logical_or logical_not logical_xor isclose
    bitwise_and bitwise_or bitwise_xor bitwise_not
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __truediv__ __rtruediv__ __rdiv__ __floordiv__ __rfloordiv__ __mod__
    __pow__ __rpow__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    __and__ __or__ __xor__ __invert__
    float double half bfloat16 type int long bool cpu cuda clone contiguous detach
    zeros_like ones_like empty_like full_like alias
    """.split()
_PLACES = (torch.Tensor, torch, F)
_IN_PLACE = [
    *(f"{name}_" for name in _NAMES if any(f"{name}_" in dir(at) for at in _PLACES)),
    *"copy_ fill_ zero_ __iadd__ __isub__ __imul__ __itruediv__".split(),
    *"relu6_ hardswish_".split(),  # of torch._C._nn alone
]
_RANDOM = """
    dropout alpha_dropout rrelu rand_like randn_like bernoulli bernoulli_ uniform_ normal_
    """.split()


seen_in_graphs([torch.rand_like, torch.randn_like, torch.randint_like])
seen_in_graphs(
    vars(at)[name] for at in (torch, F) for name in _IN_PLACE if name in vars(at)
)


@rule(_NAMES)
def pointwise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute on the shards; the result is sharded as they are."""
    if func.__name__ == "where" and len(args) + len(kwargs) == 1:
        raise mixes("where", args[0].sharding, "of a condition alone has no rule")
    sharding, values, named = _aligned_all(func.__name__, args, kwargs)
    return _marked(local_call(func, values, named), sharding)


@rule(_IN_PLACE)
def in_place(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Write into the shard; a plain tensor cannot take the values of a shard."""
    name, x = func.__name__, args[0]
    expect_first(name, x, [*args, *kwargs.values()])
    if name == "detach_" and x.requires_grad:
        raise mixes(name, x.sharding, "would cut off a view; use detach()")
    return pointwise(func, args, kwargs)


@rule(["equal", "allclose"])
def _compare(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether the tensors are equal on all ranks, the same answer on each."""
    sharding, values, named = _aligned_all(func.__name__, args, kwargs)
    x = first_sharded([*args, *kwargs.values()])
    differ = torch.tensor(not local_call(func, values, named), device=x.device)
    return not collectives.all_reduce(differ.int(), sharding.group, "max")


@rule(["to", "type_as"])
def _to(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Convert; a tensor given as the example is read for its dtype and device only."""
    result = cast(Tensor, local_call(func, args, kwargs))
    x = args[0]
    if not isinstance(x, ShardedTensor):
        return result
    return result if isinstance(result, ShardedTensor) else mark(result, x.sharding)


@rule(_RANDOM)
def noise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Masks of shards are drawn from the rank's own stream."""
    x = args[0]
    expect_first(func.__name__, x, [*args, *kwargs.values()])
    if not kwargs.get("training", True):
        return pointwise(func, args, kwargs)
    if torch.compiler.is_compiling():
        return _compiled_noise(func, args, kwargs)
    with shard_rng(x.sharding.group, x.device):
        return pointwise(func, args, kwargs)


def _compiled_noise(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Take this rank's part of the noise of the whole.

    The random stream of a compiled graph is the same on all ranks, and no code can change it.
    """
    name, (x, *rest) = func.__name__, args
    sharding, local, shape = x.sharding, x.to_local(), whole_shape(x)
    place = (sharding.dim, sharding.ranges, sharding.group)
    if name in ("rand_like", "randn_like"):
        noise = func(local.new_empty(shape), *rest, **kwargs)
        return mark(collectives.own_shard(noise, *place), sharding)
    if name != "dropout":
        raise mixes(name, sharding, "has no rule in a compiled graph")
    p, training, inplace = bound(rest, kwargs, p=0.5, training=True, inplace=False)
    if not training:
        return cast(Tensor, x)
    factors = collectives.own_shard(F.dropout(local.new_ones(shape), p), *place)
    return mark(local.mul_(factors) if inplace else local * factors, sharding)


def _marked(result: Any, sharding: Sharding) -> Any:
    """Mark `result`; `sharding.dim` is negative here, counted from the back."""
    if isinstance(result, ShardedTensor) or not isinstance(result, Tensor):
        return result
    return mark(result, sharding.at(result.dim() + sharding.dim))


def _aligned_all(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Sharding, tuple[Any, ...], dict[str, Any]]:
    """Return the common sharding, its dim counted from the back, and matching arguments."""
    x = first_sharded([*args, *kwargs.values()])
    sharding = x.sharding.at(x.sharding.dim - x.dim())
    values = tuple(aligned(name, value, sharding) for value in args)
    named = {key: aligned(name, value, sharding) for key, value in kwargs.items()}
    return sharding, values, named


def aligned(name: str, value: Any, sharding: Sharding) -> Any:
    """Return `value` as it may stand beside a shard whose `dim` counts from the back.

    Raises:
        ShardedOpError: If `value` is sharded otherwise.
        ShapeError: If `value` is a plain tensor of neither the whole size nor size 1.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ShardedTensor):
        return _same_split(name, value, sharding)
    has_dim = value.dim() >= -sharding.dim
    if has_dim and value.shape[sharding.dim] == sharding.ranges.size:
        return ops.scatter(
            value, sharding.dim, ranges=sharding.ranges, group=sharding.group
        )
    if not has_dim or value.shape[sharding.dim] == 1:
        return ops.enter(value, sharding.group)
    known = recalled(value)
    if known is not value:
        return _same_split(name, known, sharding)
    raise ShapeError(
        f"{name}: a plain tensor of size {value.shape[sharding.dim]} in dim"
        f" {sharding.dim} meets a tensor of {sharding.ranges.size} indices spread over"
        f" {sharding.group.size} ranks. Expected the whole {sharding.ranges.size} or 1. If"
        " it is this rank's shard, mark it with ShardedTensor.from_local(x, dim)."
    )


def _same_split(name: str, value: ShardedTensor, sharding: Sharding) -> ShardedTensor:
    own = value.sharding
    if own.at(own.dim - value.dim()) != sharding:
        raise ShardedOpError(
            f"{name}: its arguments are sharded differently: dim {own.dim} of"
            f" {own.ranges.size} indices against dim {sharding.dim} (from the back) of"
            f" {sharding.ranges.size}. Gather one with torchshard.distributed.gather(x)."
        )
    return value
