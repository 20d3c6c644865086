"""Operands of one operation that stand beside one another, one dim of which is divided.

Each dim of each operand has a label, as the letters of an einsum: dims of one label are the
same index of the operation. What an operation then needs to know is which label is divided.

    an operand                          what takes part in the compute of this rank
    divided at that label               its shard
    plain, with that label              this rank's part (backward: all-gather)
    plain, without it or of size 1      all of it; its gradient is summed over the ranks
    divided at another label            an error, before any collective
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torchshard.distributed import ops
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.tensor.sharded import ShardedTensor, Sharding, mixes

Labels: TypeAlias = Sequence[Hashable]


class Division(NamedTuple):
    """The label that is divided, and how; `sharding.dim` is that of the first operand."""

    label: Hashable
    sharding: Sharding


def division(
    name: str, operands: Sequence[Tensor | None], labels: Sequence[Labels]
) -> Division:
    """Return which label of the operands is divided.

    Raises:
        ShardedOpError: If two are, or one in two ways.
    """
    found: Division | None = None
    for operand, its_labels in zip(operands, labels, strict=True):
        if isinstance(operand, ShardedTensor):
            label, sharding = its_labels[operand.sharding.dim], operand.sharding
            if found is None:
                found = Division(label, sharding)
            elif label != found.label or not _alike(sharding, found.sharding):
                raise _differ(name, found.sharding, sharding)
    if found is None:
        raise ShardedOpError(
            f"{name}: expected an operand that is divided, as an input."
        )
    if any(its_labels.count(found.label) > 1 for its_labels in labels):
        raise mixes(name, found.sharding, "takes a diagonal of it")
    return found


def _alike(first: Sharding, second: Sharding) -> bool:
    return first.ranges == second.ranges and first.group == second.group


def _differ(name: str, first: Sharding, second: Sharding) -> ShardedOpError:
    return ShardedOpError(
        f"{name}: its arguments are sharded differently: dim {first.dim} of"
        f" {first.ranges.size} indices as {first.ranges.lengths} against dim {second.dim} of"
        f" {second.ranges.size} as {second.ranges.lengths}. Gather one with"
        " torchshard.distributed.gather(x)."
    )


def part(
    name: str,
    operand: Tensor,
    labels: Labels,
    divided: Division,
    *,
    broadcasts: bool = False,
) -> Tensor:
    """Return what of `operand` takes part in the compute of this rank, in a `local_call`.

    Args:
        name: The operation, for the error.
        operand: One of its operands, divided or plain.
        labels: The labels of the operand's dims.
        divided: The label that is divided, and how.
        broadcasts: Whether size 1 stands for any size.

    Raises:
        ShapeError: If a plain operand does not have the whole size.
    """
    if isinstance(operand, ShardedTensor):
        return operand
    sharding = divided.sharding
    if divided.label not in labels:
        return ops.copy(operand, sharding.group)
    dim, ranges = labels.index(divided.label), sharding.ranges
    size = operand.shape[dim]
    if size == ranges.size:
        return ops.scatter(operand, dim, ranges=ranges, group=sharding.group)
    if broadcasts and size == 1:
        return ops.copy(operand, sharding.group)
    raise ShapeError(
        f"{name}: a plain tensor of size {size} in dim {dim} meets a tensor of"
        f" {ranges.size} indices spread over {sharding.group.size} ranks. Expected the"
        f" whole {ranges.size}. If it is this rank's shard, mark it with"
        " ShardedTensor.from_local(x, dim)."
    )
