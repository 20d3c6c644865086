"""Operands of one operation that stand beside one another, one dim of which is divided.

Each dim of each operand has a label, as the letters of an einsum: dims of one label are the
same index of the operation. What an operation then needs to know is which label is divided.

    an operand                          what takes part in the compute of this rank
    divided at that label               its shard
    plain, with that label              this rank's part (backward: all-gather)
    plain, without it or of size 1      all of it; its gradient is summed over the ranks
    divided at another label            an error, before any collective

A dim may hold several indices of its label each: `Units("group", 4)` are the channels of
groups of 4. They stay together, and dims with units of other sizes are of the same label.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor
from torchshard.distributed import ops
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.tensor.sharded import ShardedTensor, Sharding, mark, mixes

Labels: TypeAlias = Sequence[Hashable]


class Units(NamedTuple):
    """The label of a dim that holds `size` indices for each one of `label`."""

    label: Hashable
    size: int


class Division(NamedTuple):
    """The label that is divided, and how; `sharding.dim` is that of the first operand."""

    label: Hashable
    sharding: Sharding

    def place(self, labels: Labels) -> tuple[int, int] | None:
        """Return the dim that has the label, and the size of its units; None without one."""
        for dim, label in enumerate(labels):
            if label == self.label:
                return dim, 1
            if isinstance(label, Units) and label.label == self.label:
                return dim, label.size
        return None

    def marked(self, result: Tensor, labels: Labels) -> Tensor:
        """Return this rank's part of a result, marked; as it is if the label is not there."""
        place = self.place(labels)
        if place is None:
            return result
        dim, unit = place
        ranges = self.sharding.ranges.scaled(unit)
        return mark(result, Sharding(dim, ranges, self.sharding.group))

    def expect_not(self, name: str, reasons: Mapping[Hashable, str]) -> None:
        """Check that the label is none of those that `reasons` say may not be divided.

        Raises:
            ShardedOpError: If it is one.
        """
        if self.label in reasons:
            raise mixes(name, self.sharding, reasons[self.label])

    def expect_some(self, name: str) -> None:
        """Check that every rank holds an index, for functions that torch has for no fewer.

        Raises:
            ShardedOpError: If a rank holds none.
        """
        if 0 in self.sharding.ranges.lengths:
            size, ranks = self.sharding.ranges.size, self.sharding.group.size
            why = f"takes no empty part: {size} of {self.label!r} for {ranks} ranks"
            raise mixes(name, self.sharding, why + ". Use fewer ranks")

    def expect_once(self, name: str) -> None:
        """Check that no index of the label is held by two ranks: it would count twice.

        Raises:
            ShardedOpError: If one is.
        """
        if self.sharding.ranges.overlaps:
            why = "would add indices that several ranks hold twice"
            raise mixes(name, self.sharding, why)


def division(
    name: str, operands: Sequence[Tensor | None], labels: Sequence[Labels]
) -> Division:
    """Return which label of the operands is divided.

    Raises:
        ShardedOpError: If two are, or one in two ways or across its units.
    """
    found: Division | None = None
    for operand, its_labels in zip(operands, labels, strict=True):
        if isinstance(operand, ShardedTensor):
            label, sharding = _in_units(name, operand.sharding, its_labels)
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


def _in_units(name: str, sharding: Sharding, labels: Labels) -> Division:
    """Return the division of one operand; its ranges count units, not indices."""
    label = labels[sharding.dim]
    if not isinstance(label, Units):
        return Division(label, sharding)
    ranges = sharding.ranges.in_units(label.size)
    if ranges is None:
        why = (
            f"needs the {label.size} indices of each {label.label} on one rank. Divide it"
            f" in units of {label.size}"
        )
        raise mixes(name, sharding, why)
    return Division(label.label, sharding.held(ranges))


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
    group, place = divided.sharding.group, divided.place(labels)
    if place is None:
        return ops.copy(operand, group)
    dim, unit = place
    ranges = divided.sharding.ranges.scaled(unit)
    size = operand.shape[dim]
    if size == ranges.size:
        return ops.scatter(operand, dim, ranges=ranges, group=group)
    if broadcasts and size == 1:
        return ops.copy(operand, group)
    raise ShapeError(
        f"{name}: a plain tensor of size {size} in dim {dim} meets a tensor of"
        f" {ranges.size} indices spread over {group.size} ranks. Expected the"
        f" whole {ranges.size}. If it is this rank's shard, mark it with"
        " ShardedTensor.from_local(x, dim)."
    )
