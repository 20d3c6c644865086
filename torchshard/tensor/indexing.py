"""Picks by index along a dim: gather, take_along_dim and index_select.

divided                     result
the dim, picked from        the rank that holds an index picks it: one all-reduce
the indices                 divided as they are, local
another dim, of both alike  local
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchshard.distributed import collectives, ops
from torchshard.errors import ShapeError, TargetError
from torchshard.tensor.lookups import never_empty, own_ids
from torchshard.tensor.operands import Division, Labels
from torchshard.tensor.products import product
from torchshard.tensor.sharded import (
    ShardedTensor,
    bound,
    first_sharded,
    mixes,
    rule,
    whole,
    whole_shape,
    wrapped_dim,
)


def picked_along(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Compute `gather(input, dim, index)` or `take_along_dim(input, indices, dim)`."""
    name = func.__name__
    options: dict[str, Any] = {"input": None, "dim": None, "index": None}
    if name == "take_along_dim":
        options = {"input": None, "indices": None, "dim": None}
    given = dict(zip(options, bound(args, kwargs, **options), strict=True))
    x, dim = given["input"], given["dim"]
    index = given["indices"] if name == "take_along_dim" else given["index"]
    if dim is None or x.dim() != index.dim():
        why = "needs a dim, and an index of as many dims"
        raise mixes(name, first_sharded([x, index]).sharding, why)
    dim = wrapped_dim(x, dim)
    if name == "take_along_dim":
        _expect_no_broadcast(name, x, index, dim)
    row, output = _labels(x, dim)
    return _picked(name, x, dim, index, [row, output], output)


def _labels(x: Tensor, dim: int) -> tuple[Labels, Labels]:
    """Return the labels of what is picked from along `dim`, and of what is picked."""
    labels = list(range(x.dim()))
    before, behind = labels[:dim], labels[dim + 1 :]
    return (*before, "row", *behind), (*before, "id", *behind)


def _expect_no_broadcast(name: str, x: Tensor, index: Tensor, dim: int) -> None:
    """Check that the sizes of other dims are equal.

    Raises:
        ShapeError: If they are not.
    """
    sizes = [list(whole_shape(value)) for value in (x, index)]
    if sizes[0][:dim] + sizes[0][dim + 1 :] != sizes[1][:dim] + sizes[1][dim + 1 :]:
        raise ShapeError(
            f"{name}: shapes {tuple(sizes[0])} and {tuple(sizes[1])} differ beside dim"
            f" {dim}. Expected equal sizes there, of tensors that are divided."
        )


def _picked(
    name: str,
    x: Tensor,
    dim: int,
    index: Tensor,
    labels: list[Labels],
    output: Labels,
) -> Tensor:
    """Return what the indices name along `dim`; with one index a row, they are the same."""
    rows: list[Division] = []
    is_flat = index.dim() == 1 and name == "index_select"
    call: Callable[..., Tensor] = torch.index_select if is_flat else torch.gather

    def check(divided: Division) -> None:
        _expect_alike(name, divided, (x, index), labels)
        _expect_inside(name, index, whole_shape(x)[dim], divided)
        rows.append(divided)

    def compute(x: Tensor, index: Tensor) -> Tensor:
        if rows[0].label != "row":
            return call(x, dim, index)
        sharding = rows[0].sharding
        own, places = own_ids(index.long(), sharding)
        some = never_empty(x.movedim(dim, 0), sharding).movedim(0, dim)
        if is_flat:
            own = own.reshape(-1, *[1] * (x.dim() - dim - 1))
        return torch.where(own, call(some, dim, places), 0)

    return product(name, compute, (x, index), labels, output, check=check)


def _expect_alike(
    name: str, divided: Division, operands: tuple[Tensor, ...], labels: list[Labels]
) -> None:
    """Check that what is divided is as long in each operand: torch lets an index be shorter.

    Raises:
        ShapeError: If it is not.
    """
    places = [divided.place(its) for its in labels]
    sizes = {
        whole_shape(x)[place[0]]
        for x, place in zip(operands, places, strict=True)
        if place is not None
    }
    if len(sizes) > 1:
        raise ShapeError(
            f"{name}: the divided dim has sizes {sorted(sizes)} in its arguments. Expected"
            " the same size; gather them with torchshard.distributed.gather(x)."
        )


def _expect_inside(name: str, index: Tensor, size: int, divided: Division) -> None:
    """Check that every index lies in the dim; one all-reduce if the indices are divided.

    Raises:
        TargetError: If one does not.
    """
    if torch.compiler.is_compiling():
        return
    own = index.to_local() if isinstance(index, ShardedTensor) else index
    bad = ((own < 0) | (own >= size)).any()
    if isinstance(index, ShardedTensor):
        bad = collectives.all_reduce(bad.int(), divided.sharding.group, "max")
    if bad:
        raise TargetError(
            f"{name}: an index is out of range. Expected indices from 0 to {size - 1}."
        )


@rule(["index_select"])
def _index_select(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, dim, index = bound(args, kwargs, input=None, dim=None, index=None)
    if not x.dim():
        raise mixes("index_select", index.sharding, "of a number has no rule")
    dim = wrapped_dim(x, dim)
    row, output = _labels(x, dim)
    return _picked("index_select", x, dim, index, [row, ("id",) * index.dim()], output)


@rule(["take_along_dim"])
def _take_along_dim(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    return picked_along(func, args, kwargs)


@rule(["gather"])
def _gather(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """`torchshard.distributed.gather` un-shards; torch's own picks along a dim."""
    if func is not ops.gather:
        return picked_along(func, args, kwargs)
    x, dim = args[:2]
    if dim not in (-1, x.sharding.dim, x.sharding.dim - x.dim()):
        raise ShapeError(
            f"dim={dim} is not the dim along which this tensor is sharded,"
            f" {x.sharding.dim}. Leave it out, or pass {x.sharding.dim}."
        )
    return whole(x, kwargs.get("grad") or "whole")
