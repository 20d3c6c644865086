"""Lookups in a table: embedding, embedding_bag, `table[ids]`.

    divided                 result
    columns: table          divided along its last dims, local
    rows: table             each rank looks up the rows that it holds; the ranks' sum
    ids                     divided as the ids are, local; the table's gradient is summed

A foreign id looks up a row of this rank and is masked, so that no shape depends on the ids:
a compiled graph stays whole, and no device waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.checks import expect_indices
from torchshard.errors import ShapeError
from torchshard.tensor.operands import Division, Labels
from torchshard.tensor.products import product
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    bound,
    first_sharded,
    mixes,
    rule,
    whole_shape,
)

_TABLE: Labels = ("row", "column")
_RENORMALISES = (
    "with max_norm rescales rows in place, which all ranks would have to do alike."
    " ParallelEmbedding does"
)
_SPARSE = (
    "with sparse gives a gradient that the view of a marked table cannot pass on."
    " ParallelEmbedding takes it"
)
_COUNTS = "with scale_grad_by_freq counts the ids of this rank alone"


@rule(["embedding"])
def _embedding(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    ids, table, padding_idx, max_norm, by_freq, sparse = _embedding_arguments(
        func, args, kwargs
    )
    rows, size = _divided_rows(table), whole_shape(table)[0]
    if padding_idx is not None:
        padding_idx += size * (padding_idx < 0)

    def check(divided: Division) -> None:
        _check_options("embedding", divided, max_norm, sparse)
        if divided.label not in _TABLE and by_freq:
            raise mixes("embedding", divided.sharding, _COUNTS)
        if rows is not None:
            expect_indices(ids, size, "input")

    def compute(ids: Tensor, table: Tensor) -> Tensor:
        if rows is None:
            return _rows(ids, table, padding_idx, by_freq)
        padding = None
        if padding_idx is not None:
            padding = rows.ranges.place(rows.group.rank, padding_idx)
        look_up = partial(_rows, padding_idx=padding, by_freq=by_freq)
        return _own_rows(look_up, ids, table, rows, only_own=by_freq)

    batch = tuple(range(ids.dim()))
    labels = (batch, _TABLE)
    return product(
        "embedding", compute, (ids, table), labels, (*batch, "column"), check=check
    )


def _rows(ids: Tensor, table: Tensor, padding_idx: int | None, by_freq: bool) -> Tensor:
    return F.embedding(ids, table, padding_idx, scale_grad_by_freq=by_freq)


def _check_options(
    name: str, divided: Division, max_norm: float | None, sparse: bool
) -> None:
    """Check that the table is only read, and that its gradient is dense."""
    if max_norm is not None:
        raise mixes(name, divided.sharding, _RENORMALISES)
    if sparse:
        raise mixes(name, divided.sharding, _SPARSE)


def _embedding_arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return ids, table, padding_idx, max_norm, scale_grad_by_freq and sparse."""
    if func is F.embedding:
        names = {"input": None, "weight": None, "padding_idx": None, "max_norm": None}
        options = {"norm_type": 2.0, "scale_grad_by_freq": False, "sparse": False}
        *given, _, by_freq, sparse = bound(args, kwargs, **names, **options)
        return *given, by_freq, sparse
    names = {"weight": None, "indices": None}
    options = {"padding_idx": -1, "scale_grad_by_freq": False, "sparse": False}
    table, ids, padding, *rest = bound(args, kwargs, **names, **options)
    return ids, table, None if padding < 0 else padding, None, *rest


def _divided_rows(table: Tensor) -> Sharding | None:
    """Return how the rows of a table are divided; None if they are not."""
    if isinstance(table, ShardedTensor) and table.sharding.dim == 0:
        return table.sharding
    return None


def own_ids(ids: Tensor, rows: Sharding) -> tuple[Tensor, Tensor]:
    """Return which ids this rank holds, and where; the others at place 0."""
    own, places, place = torch.zeros_like(ids, dtype=torch.bool), ids * 0, 0
    for start, stop in rows.ranges.per_rank[rows.group.rank]:
        inside = (ids >= start) & (ids < stop)
        own, places = own | inside, torch.where(inside, ids - start + place, places)
        place += stop - start
    return own, places


def never_empty(table: Tensor, rows: Sharding) -> Tensor:
    """Return the rows that this rank holds, or one of zeros: a foreign id looks one up."""
    if rows.length:
        return table
    return torch.cat([table, table.new_zeros(1, *table.shape[1:])])


def _own_rows(
    look_up: Callable[[Tensor, Tensor], Tensor],
    ids: Tensor,
    table: Tensor,
    rows: Sharding,
    *,
    only_own: bool = False,
) -> Tensor:
    """Return the rows of the ids that this rank holds, and zeros for the others.

    With `only_own` foreign ids look up nothing, where a gradient would show it.
    """
    own, places = own_ids(ids, rows)
    row_mask = own.reshape(*own.shape, *[1] * (table.dim() - 1))
    if only_own:
        found = look_up(places[own], table)
        zeros = found.new_zeros(*ids.shape, *table.shape[1:])
        return zeros.masked_scatter(row_mask, found)
    return torch.where(row_mask, look_up(places, never_empty(table, rows)), 0)


_BAG: dict[str, Any] = {
    "input": None,
    "weight": None,
    "offsets": None,
    "max_norm": None,
    "norm_type": 2.0,
    "scale_grad_by_freq": False,
    "mode": "mean",
    "sparse": False,
    "per_sample_weights": None,
    "include_last_offset": False,
    "padding_idx": None,
}
_IN_BAG: dict[Hashable, str] = {
    "place": "sums over a bag; divide the bags, as rows of ids without offsets"
}


@rule(["embedding_bag"])
def _embedding_bag(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    if func is not F.embedding_bag:
        sharding = first_sharded([*args, *kwargs.values()]).sharding
        raise mixes("torch.embedding_bag", sharding, "has no rule; use F.embedding_bag")
    given = dict(zip(_BAG, bound(args, kwargs, **_BAG), strict=True))
    ids, table = given.pop("input"), given.pop("weight")
    if table.dtype == torch.int64 and ids.is_floating_point():
        ids, table = table, ids  # as torch does: the order of arguments once was this
    weights = given.pop("per_sample_weights")
    rows = _divided_rows(table)

    def compute(ids: Tensor, table: Tensor, *weights: Tensor) -> Tensor:
        if rows is None:
            own = weights[0] if weights else None
            return F.embedding_bag(ids, table, **given, per_sample_weights=own)
        return _own_bags(ids, table, rows, given, *weights)

    places: Labels = ("bag", "place") if ids.dim() == 2 else ("place",)
    factors, labels = [ids, table], [places, _TABLE]
    if weights is not None:
        factors, labels = [*factors, weights], [*labels, places]
    result = product(
        "embedding_bag",
        compute,
        factors,
        labels,
        ("bag", "column"),
        check=lambda divided: _check_bags(divided, ids, weights, given),
    )
    if rows is None or given["mode"] == "sum":
        return result
    return result / _bag_sizes(ids, rows, given).to(result.dtype)


def _bag_sizes(ids: Tensor, rows: Sharding, given: dict[str, Any]) -> Tensor:
    """Return how many ids count in each bag, at least 1; torch's own error for bad offsets."""
    ones = torch.ones(1, 1, device=ids.device)
    sums = F.embedding_bag(
        ids * 0,
        ones,
        given["offsets"],
        mode="sum",
        per_sample_weights=(ids != _padding(given, rows)).to(ones.dtype),
        include_last_offset=given["include_last_offset"],
    )
    return sums.clamp_min(1)


def _own_bags(
    ids: Tensor, table: Tensor, rows: Sharding, given: dict[str, Any], *weights: Tensor
) -> Tensor:
    """Return the sums of the rows of each bag that this rank holds.

    Ids that do not count here go to a bag of their own behind the others, so that the row
    which they look up, infinite or nan, is in no sum.
    """
    own, places = own_ids(ids, rows)
    counted = own & (ids != _padding(given, rows))
    bags, num_bags = _bag_of_each(ids, given)
    bags, order = torch.where(counted, bags, num_bags).flatten().sort(stable=True)
    starts = torch.searchsorted(bags, torch.arange(num_bags + 1, device=ids.device))
    weight = weights[0] if weights else table.new_ones(())
    sums = F.embedding_bag(
        places.flatten()[order].long(),
        never_empty(table, rows),
        starts,
        mode="sum",
        per_sample_weights=torch.where(counted, weight, 0).flatten()[order],
    )
    return sums[:num_bags]


def _bag_of_each(ids: Tensor, given: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the number of the bag of each id, and how many bags there are."""
    offsets = given["offsets"]
    if offsets is None:
        return torch.arange(len(ids), device=ids.device).unsqueeze(1), len(ids)
    places = torch.arange(len(ids), device=ids.device)
    bags = torch.searchsorted(offsets.long(), places, right=True) - 1
    return bags, len(offsets) - given["include_last_offset"]


def _padding(given: dict[str, Any], rows: Sharding) -> int:
    """Return the id that no bag counts, from the front; -1 if there is none."""
    padding = given["padding_idx"]
    return -1 if padding is None else int(padding) % rows.ranges.size


def _check_bags(
    divided: Division, ids: Tensor, weights: Tensor | None, given: dict[str, Any]
) -> None:
    """Check that the bags come out right, before any collective."""
    name, sharding = "embedding_bag", divided.sharding
    divided.expect_not(name, _IN_BAG)
    _check_options(name, divided, given["max_norm"], given["sparse"])
    if divided.label != "column" and given["scale_grad_by_freq"]:
        raise mixes(name, sharding, _COUNTS)
    if isinstance(given["offsets"], ShardedTensor):
        raise mixes(name, sharding, "needs all offsets")
    if divided.label == "column":
        divided.expect_some(name)
    if divided.label == "row":
        if given["mode"] == "max":
            raise mixes(name, sharding, 'of mode "max" compares rows; divide columns')
        if weights is not None and given["mode"] != "sum":
            raise mixes(name, sharding, 'weighs samples in mode "sum" alone')
        expect_indices(ids, sharding.ranges.size, "input")
        _bag_sizes(ids, sharding, given)
        _expect_all_in_bags(ids, given)


def _expect_all_in_bags(ids: Tensor, given: dict[str, Any]) -> None:
    """Check that the last offset is the end: torch 2.13 sums what is past it by its dtype.

    Raises:
        ShapeError: If it is not; on a device and in a compiled graph, an assertion there.
    """
    if given["offsets"] is None or not given["include_last_offset"]:
        return
    last = given["offsets"][-1]
    if torch.compiler.is_compiling() or last.device.type != "cpu":
        torch._assert_async(last == len(ids), "the last offset is not the end")
    elif last != len(ids):
        raise ShapeError(
            f"embedding_bag: the last offset is {int(last)}. Expected {len(ids)}, the number"
            " of ids, with include_last_offset=True."
        )


def is_lookup(index: Any) -> bool:
    """Return whether `x[index]` looks rows up by their numbers."""
    if not isinstance(index, Tensor):
        return False
    return index.dtype in (torch.int64, torch.int32)


def looked_up(table: Tensor, ids: Tensor) -> Tensor:
    """Return `table[ids]`, one of them divided; the ids count from the end if negative."""
    rows, size = _divided_rows(table), whole_shape(table)[0]

    def compute(table: Tensor, ids: Tensor) -> Tensor:
        if rows is None:
            return table[ids]
        ids = torch.where(ids < 0, ids + size, ids)
        return _own_rows(lambda places, own: own[places], ids, table, rows)

    def check(divided: Division) -> None:
        if rows is not None:
            expect_indices(torch.where(ids < 0, ids + size, ids), size, "the index")

    batch: Labels = tuple(("id", dim) for dim in range(ids.dim()))
    inner = tuple(range(table.dim() - 1))
    labels = (("row", *inner), batch)
    return product(
        "indexing", compute, (table, ids), labels, (*batch, *inner), check=check
    )
