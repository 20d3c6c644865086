"""Views and moves of dims: the result says where the sharded dim went.

Sizes are those of the whole tensor, as in code written for one device, or -1. A view may
keep the sharded dim, merge it with dims around it, split it into units, or take a packed one
apart into its blocks; anything that would cut a unit raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torchshard.distributed import ops
from torchshard.errors import ShapeError
from torchshard.layout import Ranges
from torchshard.tensor.elementwise import aligned
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    bound,
    first_sharded,
    local_call,
    mark,
    mixes,
    rule,
    whole_shape,
    wrapped_dim,
)


@rule(["view", "reshape"])
def _view(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    sizes = args[1:] or tuple(kwargs.values())
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        if sizes[0].itemsize != x.element_size():
            raise mixes("view", x.sharding, f"as {sizes[0]} would lengthen a dim")
        return mark(local_call(func, args, kwargs), x.sharding)
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    return _viewed(func.__name__, x, sizes)


@rule(["view_as", "reshape_as"])
def _view_as(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, other = args if len(args) == 2 else (args[0], kwargs["other"])
    if isinstance(x, ShardedTensor):
        return _viewed(func.__name__, x, tuple(whole_shape(other)))
    return cast(Tensor, x.reshape(whole_shape(other)))


@rule(["flatten"])
def _flatten(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor:
    x = args[0]
    first, last = bound(args[1:], kwargs, start_dim=0, end_dim=-1)
    first, last = wrapped_dim(x, first), wrapped_dim(x, last)
    shape = tuple(whole_shape(x))
    merged = math.prod(shape[first : last + 1])
    return _viewed("flatten", x, (*shape[:first], merged, *shape[last + 1 :]))


@rule(["unflatten"])
def _unflatten(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    dim, sizes = bound(args[1:], kwargs, dim=None, sizes=None)
    shape, dim = tuple(whole_shape(x)), wrapped_dim(x, dim)
    return _viewed("unflatten", x, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _viewed(name: str, x: ShardedTensor, sizes: tuple[int, ...]) -> Tensor:
    shape, own_numel = whole_shape(x), x.to_local().numel()
    for numel in (shape.numel(), own_numel):
        filled = _filled(sizes, numel)
        if math.prod(filled) == numel:
            dim, ranges = _view_place(
                name, x.sharding, shape, filled, numel != shape.numel()
            )
            sharding = Sharding(dim, ranges, x.sharding.group)
            own_sizes = (*filled[:dim], sharding.length, *filled[dim + 1 :])
            return mark(local_call(torch.Tensor.reshape, (x, own_sizes), {}), sharding)
    raise mixes(
        name,
        x.sharding,
        f"to {sizes} does not fit the whole shape {tuple(shape)} (sizes are the"
        " whole tensor's, or -1)",
    )


def _filled(sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Return the sizes of a view of `numel` elements with the one left open, if it fits."""
    known = -math.prod(sizes)
    if -1 not in sizes or not known or numel % known:
        return sizes
    return tuple(numel // known if size == -1 else size for size in sizes)


def _view_place(
    name: str,
    sharding: Sharding,
    shape: Sequence[int],
    sizes: Sequence[int],
    is_own: bool,
) -> tuple[int, Ranges]:
    """Return the dim of the view that is sharded, and who holds what of it.

    Args:
        name: Of the operation.
        sharding: Of the tensor.
        shape: The whole tensor's.
        sizes: Those of the view, in which the sharded dim has its whole size.
        is_own: Whether it has this rank's size instead, as scripts write it that compute on
            shards themselves.
    """
    rank = sharding.group.rank
    before = math.prod(shape[: sharding.dim])
    behind = math.prod(shape[sharding.dim + 1 :])
    for dim in _likely_dims(sharding.ranges, before, sizes):
        ranges = _regrouped(sharding.ranges, before, math.prod(sizes[:dim]))
        if ranges is not None:
            ranges = _rescaled(ranges, behind, math.prod(sizes[dim + 1 :]))
        if ranges is None:
            continue
        if sizes[dim] == (ranges.length(rank) if is_own else ranges.size):
            return dim, ranges
    raise mixes(name, sharding, f"to {tuple(sizes)} would mix or cut it")


def _likely_dims(ranges: Ranges, before: int, sizes: Sequence[int]) -> list[int]:
    """Return the dims of a view where the sharded one may be, the likeliest first.

    The last dims first: a packed dim then comes apart into its blocks. One that is not
    packed rather stays where it is.
    """
    dims = list(reversed(range(len(sizes))))
    if ranges.block_bounds:
        return dims
    return sorted(dims, key=lambda dim: math.prod(sizes[:dim]) != before)


def _regrouped(ranges: Ranges, before: int, new_before: int) -> Ranges | None:
    """Return `ranges` of a dim with `new_before` elements before it instead of `before`.

    More of them: the dim came apart into as many blocks, all divided alike. Fewer: it took
    the dims before it into itself, and is packed.
    """
    if new_before == before:
        return ranges
    if not new_before or not before:
        return None
    if before % new_before == 0:
        return ranges.repeated(before // new_before)
    count = new_before // before
    if new_before % before or ranges.size % count:
        return None
    block = ranges.within(0, ranges.size // count)
    return block if block.repeated(count) == ranges else None


def _rescaled(ranges: Ranges, behind: int, new_behind: int) -> Ranges | None:
    """Return `ranges` of a dim with `new_behind` elements behind it instead of `behind`."""
    if not new_behind or not behind:
        return ranges if new_behind == behind else None
    return ranges.scaled(behind).in_units(new_behind)


@rule(["transpose", "swapaxes", "swapdims"])
def _transpose(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    first, second = (wrapped_dim(x, dim) for dim in [*args[1:], *kwargs.values()])
    order = list(range(x.dim()))
    order[first], order[second] = second, first
    return _permuted(x, order)


@rule(["t"])
def _t(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    return _permuted(args[0], list(reversed(range(args[0].dim()))))


@rule(["permute"])
def _permute(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    dims = args[1:] or tuple(kwargs.values())
    if len(dims) == 1 and not isinstance(dims[0], int):
        dims = tuple(dims[0])
    return _permuted(x, [wrapped_dim(x, dim) for dim in dims])


@rule(["movedim", "moveaxis"])
def _movedim(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    source, destination = bound(args[1:], kwargs, source=None, destination=None)
    if not isinstance(source, int):
        raise mixes("movedim", x.sharding, "of several dims has no rule; use permute")
    order = list(range(x.dim()))
    order.insert(wrapped_dim(x, destination), order.pop(wrapped_dim(x, source)))
    return _permuted(x, order)


def _permuted(x: ShardedTensor, order: list[int]) -> Tensor:
    moved = local_call(torch.Tensor.permute, (x, order), {})
    return mark(moved, x.sharding.at(order.index(x.sharding.dim)))


@rule(["unsqueeze"])
def _unsqueeze(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    (dim,) = bound(args[1:], kwargs, dim=None)
    result = local_call(func, (x, dim), {})
    place = x.sharding.dim + (dim % result.dim() <= x.sharding.dim)
    return mark(result, x.sharding.at(place))


@rule(["squeeze"])
def _squeeze(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    (dims,) = bound(args[1:], kwargs, dim=range(x.dim()))
    dims = [dims] if isinstance(dims, int) else dims
    dims = [wrapped_dim(x, dim) for dim in dims]
    gone = [dim for dim in dims if whole_shape(x)[dim] == 1]
    if x.sharding.dim in gone:
        raise mixes("squeeze", x.sharding, "would drop it")
    place = x.sharding.dim - sum(dim < x.sharding.dim for dim in gone)
    squeezed = local_call(torch.Tensor.squeeze, (x, tuple(gone)), {})
    return mark(squeezed, x.sharding.at(place))


@rule(["expand", "expand_as", "broadcast_to"])
def _expand(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    sizes = args[1:] or tuple(kwargs.values())
    if not isinstance(x, ShardedTensor):
        return cast(Tensor, x.expand(whole_shape(first_sharded(sizes))))
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        given = sizes[0]
        sizes = tuple(whole_shape(given) if isinstance(given, Tensor) else given)
    place = len(sizes) - x.dim() + x.sharding.dim
    if place < 0:
        raise mixes(func.__name__, x.sharding, f"to {tuple(sizes)} has too few dims")
    if sizes[place] not in (-1, x.sharding.ranges.size):
        raise mixes(
            func.__name__, x.sharding, f"to size {sizes[place]} would repeat it"
        )
    local_sizes = (*sizes[:place], x.sharding.length, *sizes[place + 1 :])
    expanded = local_call(torch.Tensor.expand, (x, local_sizes), {})
    return mark(expanded, x.sharding.at(place))


@rule(["cat", "concat", "concatenate", "stack"])
def _join(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Join along a dim that is whole."""
    tensors, dim = bound(args, kwargs, tensors=None, dim=0)
    x = first_sharded(tensors)
    if any(tensor.dim() != x.dim() for tensor in tensors):
        raise mixes(func.__name__, x.sharding, "joins tensors of as many dims")
    stacking = func.__name__ == "stack"
    dim = dim % (x.dim() + 1) if stacking else wrapped_dim(x, dim)
    if not stacking and dim == x.sharding.dim:
        raise mixes("cat", x.sharding, "along it would interleave the ranks' parts")
    sharding = x.sharding.at(x.sharding.dim - x.dim())
    parts = [_joinable(func.__name__, tensor, sharding) for tensor in tensors]
    place = x.sharding.dim + (stacking and dim <= x.sharding.dim)
    return mark(local_call(func, (parts, dim), {}), x.sharding.at(place))


def _joinable(name: str, value: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's part of `value`; what is joined does not broadcast."""
    whole = whole_shape(value)
    if len(whole) < -sharding.dim or whole[sharding.dim] != sharding.ranges.size:
        raise ShapeError(
            f"{name}: a tensor of shape {tuple(whole)} is joined to one with"
            f" {sharding.ranges.size} indices in dim {sharding.dim}, spread over"
            f" {sharding.group.size} ranks. Expected the same size there; if it is this"
            " rank's shard, mark it with ShardedTensor.from_local(x, dim)."
        )
    if isinstance(value, ShardedTensor):
        return cast(Tensor, aligned(name, value, sharding))
    return ops.scatter(
        value, sharding.dim, ranges=sharding.ranges, group=sharding.group
    )
