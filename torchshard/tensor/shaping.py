"""Views and moves of dims: the result says where the sharded dim went.

Sizes are those of the whole tensor, as in code written for one device, or -1. A view may
keep the sharded dim, merge it with dims behind it, or split it into units; anything that
would interleave it with the dims before it raises.
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
    first, last = _bound(args[1:], kwargs, start_dim=0, end_dim=-1)
    first, last = wrapped_dim(x, first), wrapped_dim(x, last)
    shape = tuple(whole_shape(x))
    merged = math.prod(shape[first : last + 1])
    return _viewed("flatten", x, (*shape[:first], merged, *shape[last + 1 :]))


@rule(["unflatten"])
def _unflatten(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    dim, sizes = _bound(args[1:], kwargs, dim=None, sizes=None)
    shape, dim = tuple(whole_shape(x)), wrapped_dim(x, dim)
    return _viewed("unflatten", x, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _bound(values: Sequence[Any], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """Return the arguments named in `defaults`, given by position, by name or not at all."""
    given = dict(zip(defaults, values, strict=False))
    return [(defaults | given | kwargs)[name] for name in defaults]


def _viewed(name: str, x: ShardedTensor, sizes: tuple[int, ...]) -> Tensor:
    shape = whole_shape(x)
    if -1 in sizes:
        known = -math.prod(sizes)
        rest = shape.numel() // known if known else 0
        sizes = tuple(rest if size == -1 else size for size in sizes)
    if math.prod(sizes) != shape.numel():
        raise mixes(
            name,
            x.sharding,
            f"to {sizes} does not fit the whole shape {tuple(shape)} (sizes are the"
            " whole tensor's, or -1)",
        )
    dim, ranges = _view_place(name, x.sharding, shape, sizes)
    sharding = Sharding(dim, ranges, x.sharding.group)
    local_sizes = (*sizes[:dim], sharding.length, *sizes[dim + 1 :])
    return mark(local_call(torch.Tensor.reshape, (x, local_sizes), {}), sharding)


def _view_place(
    name: str, sharding: Sharding, shape: Sequence[int], sizes: Sequence[int]
) -> tuple[int, Ranges]:
    """Return the dim of the view that is sharded, and who holds what of it."""
    before = math.prod(shape[: sharding.dim])
    behind = math.prod(shape[sharding.dim + 1 :])
    for dim in _starts(before, sizes):
        new_behind = math.prod(sizes[dim + 1 :])
        ranges = _rescaled(sharding.ranges, behind, new_behind)
        if ranges is not None and ranges.size == sizes[dim]:
            return dim, ranges
    raise mixes(name, sharding, f"to {tuple(sizes)} would mix or cut it")


def _starts(before: int, sizes: Sequence[int]) -> list[int]:
    """Return the dims of `sizes` in front of which lie `before` elements, the last first."""
    dims = range(len(sizes))
    return [dim for dim in reversed(dims) if math.prod(sizes[:dim]) == before]


def _rescaled(ranges: Ranges, behind: int, new_behind: int) -> Ranges | None:
    """Return `ranges` of a dim with `new_behind` elements behind it instead of `behind`."""
    if not new_behind or not behind:
        return ranges if new_behind == behind else None
    bounds = [bound for part in ranges.per_rank for pair in part for bound in pair]
    if any(bound * behind % new_behind for bound in [*bounds, ranges.size]):
        return None
    per_rank = tuple(
        tuple(
            (start * behind // new_behind, stop * behind // new_behind)
            for start, stop in part
        )
        for part in ranges.per_rank
    )
    return Ranges(ranges.size * behind // new_behind, per_rank)


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
    source, destination = _bound(args[1:], kwargs, source=None, destination=None)
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
    (dim,) = _bound(args[1:], kwargs, dim=None)
    result = local_call(func, (x, dim), {})
    place = x.sharding.dim + (dim % result.dim() <= x.sharding.dim)
    return mark(result, x.sharding.at(place))


@rule(["squeeze"])
def _squeeze(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    (dims,) = _bound(args[1:], kwargs, dim=range(x.dim()))
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
    tensors, dim = _bound(args, kwargs, tensors=None, dim=0)
    x = first_sharded(tensors)
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


@rule(["chunk", "split", "unbind", "tensor_split", "narrow", "select", "flip", "roll"])
def _along_another_dim(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Cut or reorder along a dim that is whole."""
    x, name = args[0], func.__name__
    dim = _cut_dim(name, args[1:], kwargs)
    if dim is None:
        raise mixes(name, x.sharding, "without dims flattens the tensor")
    dims = [dim] if isinstance(dim, int) else dim
    dims = [wrapped_dim(x, value) for value in dims]
    if x.sharding.dim in dims:
        raise mixes(name, x.sharding, "along it would cut across the ranks' parts")
    dropped = name in ("unbind", "select") and dims[0] < x.sharding.dim
    sharding = x.sharding.at(x.sharding.dim - dropped)
    result = local_call(func, args, kwargs)
    if isinstance(result, Tensor):
        return mark(result, sharding)
    return tuple(mark(part, sharding) for part in result)


def _cut_dim(name: str, values: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    first = {"unbind": 0, "narrow": 0, "select": 0, "flip": 0}.get(name, 1)
    if name == "flip":
        given = values[0] if len(values) == 1 else values
        return kwargs.get("dims", given)
    if len(values) > first:
        return values[first]
    return kwargs.get("dims") if name == "roll" else kwargs.get("dim", 0)


@rule(["__getitem__"])
def _getitem(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Index dims that are whole with integers and slices; `:` the sharded one."""
    x, index = args
    if not isinstance(x, ShardedTensor):
        raise mixes("indexing", first_sharded([index]).sharding, "by it has no rule")
    items = list(index) if isinstance(index, tuple) else [index]
    plain = (int, slice, type(None), type(Ellipsis))
    if any(isinstance(item, bool) or not isinstance(item, plain) for item in items):
        raise mixes("indexing", x.sharding, "with a tensor or list has no rule")
    if Ellipsis in items:
        place = items.index(Ellipsis)
        named = sum(item is not None for item in items) - 1
        items[place : place + 1] = [slice(None)] * (x.dim() - named)
    source, place = 0, 0
    for item in items:
        if item is not None and source == x.sharding.dim:
            if item != slice(None):
                raise mixes("indexing", x.sharding, "with other than ':' would cut it")
            break
        place += not isinstance(item, int)
        source += item is not None
    else:
        place += x.sharding.dim - source
    return mark(local_call(func, args, kwargs), x.sharding.at(place))
