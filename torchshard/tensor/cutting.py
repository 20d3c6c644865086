"""Cuts: chunk, split, slices, unbind and their kin say which part each rank holds of each piece.

Along a dim that is whole a cut is local. Along the sharded dim it is right, and local, between
the blocks of a packed dim (q, k, v; gate, up): a rank holds its share of every block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor
from torchshard.errors import ShapeError
from torchshard.tensor.lookups import is_lookup, looked_up
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    bound,
    expect_first,
    first_sharded,
    local_call,
    mark,
    mixes,
    rule,
    wrapped_dim,
)


@rule(["unbind", "select", "flip", "roll"])
def _along_another_dim(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Take apart or reorder along a dim that is whole."""
    x, name = args[0], func.__name__
    expect_first(name, x, [*args, *kwargs.values()])
    dim = _dim_of(name, args[1:], kwargs)
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


def _dim_of(name: str, values: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if name == "flip":
        given = values[0] if len(values) == 1 else values
        return kwargs.get("dims", given)
    if name == "roll":
        return values[1] if len(values) > 1 else kwargs.get("dims")
    return values[0] if values else kwargs.get("dim", 0)


_SECOND = {
    "chunk": "chunks",
    "split": "split_size_or_sections",
    "split_with_sizes": "split_sizes",
    "tensor_split": "indices_or_sections",
}
"""What the second argument of each is called."""


@rule(_SECOND)
def _split(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Cut along a dim that is whole, or between the blocks of a packed one."""
    x, name = args[0], func.__name__
    expect_first(name, x, [*args, *kwargs.values()])
    second = _SECOND[name]
    given = {_ALIASES.get(key, key): value for key, value in kwargs.items()}
    sections, dim = bound(args[1:], given, **{second: None}, dim=0)
    if wrapped_dim(x, dim) != x.sharding.dim:
        parts = local_call(func, args, kwargs)
        return tuple(mark(part, x.sharding) for part in parts)
    cuts = _cuts(name, sections, x.sharding)
    _expect_between_blocks(name, cuts, x.sharding)
    pieces = [x.sharding.ranges.within(*ends) for ends in pairwise(cuts)]
    rank = x.sharding.group.rank
    lengths = [piece.length(rank) for piece in pieces]
    parts = x.to_local().split(lengths, x.sharding.dim)
    return tuple(
        mark(part, x.sharding.held(piece))
        for part, piece in zip(parts, pieces, strict=True)
    )


_ALIASES = {
    "split_size": "split_size_or_sections",
    "sections": "indices_or_sections",
    "indices": "indices_or_sections",
}


def _cuts(name: str, sections: Any, sharding: Sharding) -> list[int]:
    """Return where torch would cut the whole dim, 0 and its size included."""
    size = sharding.ranges.size
    if isinstance(sections, Tensor):
        sections = sections.tolist()  # a number of parts, or where to cut
    if not isinstance(sections, int):
        if name == "tensor_split":
            return [0, *(slice(index).indices(size)[1] for index in sections), size]
        if sum(sections) != size:
            raise ShapeError(
                f"{name}: sizes {list(sections)} sum to {sum(sections)}. Expected {size},"
                f" the whole size of dim {sharding.dim}."
            )
        return [0, *accumulate(sections)]
    if name == "tensor_split":
        share, rest = divmod(size, sections)
        return [part * share + min(part, rest) for part in range(sections + 1)]
    step = sections if name == "split" else -(-size // sections)
    return [*range(0, size, step or 1), size]


def _expect_between_blocks(name: str, cuts: Sequence[int], sharding: Sharding) -> None:
    """Check that a dim is cut where a block of it ends.

    Raises:
        ShardedOpError: If it is cut elsewhere.
    """
    ranges = sharding.ranges
    bounds = ranges.block_bounds or (0, ranges.size)
    if not set(cuts) <= set(bounds):
        blocks = "is not packed" if len(bounds) < 3 else f"has its blocks at {bounds}"
        raise mixes(
            name,
            sharding,
            f"would cut it at {list(cuts)}, across the ranks' parts: it {blocks}. Divide"
            " the layer that made it in blocks, one for each piece, so that every rank"
            " holds its share of each",
        )


@rule(["narrow"])
def _narrow(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x = args[0]
    dim, start, length = bound(args[1:], kwargs, dim=None, start=None, length=None)
    if wrapped_dim(x, dim) != x.sharding.dim:
        return mark(local_call(func, args, kwargs), x.sharding)
    start = int(start)
    start += x.sharding.ranges.size * (start < 0)
    return _sliced("narrow", x.to_local(), x.sharding, start, start + length)


def _sliced(
    name: str, local: Tensor, sharding: Sharding, start: int, stop: int
) -> Tensor:
    """Return indices `start` to `stop` of the sharded dim, of a tensor cut nowhere else."""
    _expect_between_blocks(name, (start, stop), sharding)
    rank, ranges = sharding.group.rank, sharding.ranges
    first = ranges.within(0, start).length(rank)
    piece = sharding.held(ranges.within(start, stop))
    return mark(local.narrow(sharding.dim, first, piece.length), piece)


@rule(["__getitem__"])
def _getitem(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Index dims that are whole with integers and slices, a packed one at its blocks.

    A tensor of ids looks up rows.
    """
    x, index = args
    if is_lookup(index):
        return looked_up(x, index)
    if not isinstance(x, ShardedTensor):
        raise mixes("indexing", first_sharded([index]).sharding, "by it has no rule")
    items = full_index(x, index)
    sharding, dim = x.sharding, x.sharding.dim
    number = item_of_dim(items, dim)
    kept = [item for item in items[:number] if not isinstance(item, int)]
    if number == len(items):
        place = len(kept) + dim - sum(item is not None for item in items)
        return mark(local_call(func, args, kwargs), sharding.at(place))
    start, stop = slice_ends(items[number], sharding)
    items[number] = slice(None)
    local = local_call(func, (x, tuple(items)), kwargs)
    if (start, stop) == (0, sharding.ranges.size):
        return mark(local, sharding.at(len(kept)))
    return _sliced("indexing", local, sharding.at(len(kept)), start, stop)


def item_of_dim(items: Sequence[Any], dim: int) -> int:
    """Return the place of the item that indexes `dim`; their number if none does."""
    places = [place for place, item in enumerate(items) if item is not None]
    return places[dim] if dim < len(places) else len(items)


def full_index(x: ShardedTensor, index: Any) -> list[Any]:
    """Return the index with one item a dim in place of an Ellipsis."""
    items = list(index) if isinstance(index, tuple) else [index]
    plain = (int, slice, type(None), type(Ellipsis))
    if any(isinstance(item, bool) or not isinstance(item, plain) for item in items):
        raise mixes(
            "indexing", x.sharding, "with a list, a mask or several tensors has no rule"
        )
    if Ellipsis in items:
        place = items.index(Ellipsis)
        named = sum(item is not None for item in items) - 1
        items[place : place + 1] = [slice(None)] * (x.dim() - named)
    return items


def slice_ends(item: Any, sharding: Sharding) -> tuple[int, int]:
    """Return where a slice of the sharded dim begins and ends."""
    start, stop, step = (
        item.indices(sharding.ranges.size) if isinstance(item, slice) else (0, 0, 0)
    )
    if step != 1:
        raise mixes("indexing", sharding, f"with {item} would cut it")
    return start, max(start, stop)
