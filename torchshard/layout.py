"""Which indices of a tensor dim each rank owns. Integers only: no torch, no groups.

A dim is a list of `Segment`s laid end to end. A segment is `units x unit` elements of one
`Axis`, and ranks own contiguous ranges of the axis' units. From that follow the
`Ranges` of the dim: for every rank, the ordered global index ranges that it holds.
Slicing, gathering, state and initialisation need nothing else.

    in_proj_weight of an attention layer, 6 heads of size 2, over 4 ranks:
        Axis(6)  ->  heads 0-1, 2-3, 4, 5
        [Segment("heads", 2)] * 3  ->  rank 2 holds rows 8-9, 20-21, 32-33
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from torchshard.errors import LayoutError

Partition: TypeAlias = Callable[[int, int, int], tuple[int, int]]
Segments: TypeAlias = "str | Segment | Sequence[str | Segment]"


def balanced(num_units: int, size: int, rank: int) -> tuple[int, int]:
    """Return the half-open range of units of `rank`: the first ranks get one more.

    The rule of `torch.tensor_split`. With fewer units than ranks the last ranks get none.

    Example:
        >>> [balanced(5, 3, rank) for rank in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    share, rest = divmod(num_units, size)
    start = rank * share + min(rank, rest)
    return start, start + share + (rank < rest)


@dataclass(frozen=True)
class Axis:
    """An index set of `num_units` units (features, heads, groups, classes) to divide.

    Args:
        num_units: How many units there are.
        partition: Maps `(num_units, size, rank)` to the rank's half-open range. Ranges of
            different ranks may overlap; together they must cover all units.

    Raises:
        LayoutError: If `num_units` is negative.
    """

    num_units: int
    partition: Partition = balanced

    def __post_init__(self) -> None:
        if self.num_units < 0:
            raise LayoutError(
                f"num_units={self.num_units} is negative. Expected 0 or more units."
            )

    def range(self, size: int, rank: int) -> tuple[int, int]:
        """Return the half-open range of units of `rank` out of `size`."""
        return self.partition(self.num_units, size, rank)


@dataclass(frozen=True)
class _CoveringPartition:
    axis: Axis
    ratio: int

    def __call__(self, num_units: int, size: int, rank: int) -> tuple[int, int]:
        start, stop = self.axis.range(size, rank)
        return (start // self.ratio, -(-stop // self.ratio)) if stop > start else (0, 0)


def covering(axis: Axis, ratio: int) -> Axis:
    """Return the axis whose unit `u` serves units `u * ratio ... (u + 1) * ratio` of `axis`.

    A rank holds every unit that its units of `axis` need, so neighbouring ranks may hold the
    same one: key/value heads of grouped-query attention.

    Raises:
        LayoutError: If `ratio` does not divide the units of `axis`.

    Example:
        >>> kv = covering(Axis(6), 3)
        >>> [kv.range(4, rank) for rank in range(4)]
        [(0, 1), (0, 2), (1, 2), (1, 2)]
    """
    if ratio < 1 or axis.num_units % ratio:
        raise LayoutError(
            f"ratio={ratio} does not divide the {axis.num_units} units of the axis."
            " Expected a divisor: each covering unit serves the same number of units."
        )
    return Axis(axis.num_units // ratio, _CoveringPartition(axis, ratio))


@dataclass(frozen=True)
class Segment:
    """One block of a dim: `unit` consecutive elements for each unit of the named axis.

    Raises:
        LayoutError: If `unit` is less than 1.
    """

    axis: str
    unit: int = 1

    def __post_init__(self) -> None:
        if self.unit < 1:
            raise LayoutError(
                f"unit={self.unit} in Segment({self.axis!r}) is less than 1. Expected the"
                " number of elements that each unit of the axis has."
            )


def as_segments(segments: Segments) -> tuple[Segment, ...]:
    """Return `segments` in full form: a name is a segment, a single one a list of one."""
    several = [segments] if isinstance(segments, str | Segment) else segments
    return tuple(Segment(one) if isinstance(one, str) else one for one in several)


@dataclass(frozen=True)
class Whole:
    """The layout of a tensor that is the same on every rank.

    Args:
        dim: A dim whose size is checked, counted as torch counts dims.
        size: The size that `dim` must have.
    """

    dim: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class Shard:
    """The layout of a tensor of which every rank holds a part of one dim.

    Args:
        dim: The sharded dim, counted as torch counts dims.
        segments: What the dim consists of: an axis' name, a `Segment`, or several.
    """

    dim: int
    segments: Segments

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", as_segments(self.segments))


@dataclass(frozen=True)
class Partial:
    """The layout of a tensor whose sum over the ranks is meant."""


Layout: TypeAlias = Whole | Shard | Partial


@dataclass(frozen=True)
class Ranges:
    """The global index ranges of one dim that each rank holds, in local order.

    Attributes:
        size: Global size of the dim.
        per_rank: For each rank, its half-open ranges `(start, stop)`, none of them empty.
        block_bounds: Where the blocks of a packed dim begin and end, 0 and `size` included;
            empty if it is not packed. Two dims are divided alike whatever their blocks.
    """

    size: int
    per_rank: tuple[tuple[tuple[int, int], ...], ...]
    block_bounds: tuple[int, ...] = field(default=(), compare=False)

    def length(self, rank: int) -> int:
        """Return the number of indices that `rank` holds."""
        return sum(stop - start for start, stop in self.per_rank[rank])

    @property
    def lengths(self) -> list[int]:
        """The number of indices that each rank holds."""
        return [self.length(rank) for rank in range(len(self.per_rank))]

    @property
    def overlaps(self) -> bool:
        """Whether some index is held by more than one rank."""
        return sum(self.lengths) != self.size

    @property
    def is_contiguous(self) -> bool:
        """Whether the ranks hold one range each, laid end to end in rank order."""
        flat = [bound for ranges in self.per_rank for bound in ranges]
        starts = [0] + [stop for _, stop in flat]
        one_each = all(len(ranges) <= 1 for ranges in self.per_rank)
        return one_each and starts == [start for start, _ in flat] + [self.size]

    def offset(self, rank: int) -> int:
        """Return the first global index of `rank`, for a dim whose ranges are contiguous."""
        return sum(self.lengths[:rank])

    def place(self, rank: int, index: int) -> int | None:
        """Return where `rank` holds the global `index`; None if it does not.

        Example:
            >>> balanced_ranges(5, 2).place(1, 4), balanced_ranges(5, 2).place(1, 0)
            (1, None)
        """
        before = 0
        for start, stop in self.per_rank[rank]:
            if start <= index < stop:
                return before + index - start
            before += stop - start
        return None

    def scaled(self, factor: int) -> Ranges:
        """Return the ranges of a dim in which every index became `factor` indices."""
        per_rank = tuple(
            tuple((start * factor, stop * factor) for start, stop in ranges)
            for ranges in self.per_rank
        )
        bounds = tuple(bound * factor for bound in self.block_bounds)
        return Ranges(self.size * factor, per_rank, bounds)

    def in_units(self, unit: int) -> Ranges | None:
        """Return the ranges of the units of `unit` indices; None where a range cuts one.

        Example:
            >>> balanced_ranges(6, 2).in_units(3) == balanced_ranges(2, 2)
            True
        """
        ends = [end for ranges in self.per_rank for pair in ranges for end in pair]
        if unit < 1 or any(end % unit for end in (*ends, self.size)):
            return None
        per_rank = tuple(
            tuple((start // unit, stop // unit) for start, stop in ranges)
            for ranges in self.per_rank
        )
        whole_blocks = not any(bound % unit for bound in self.block_bounds)
        bounds = tuple(bound // unit for bound in self.block_bounds)
        return Ranges(self.size // unit, per_rank, bounds if whole_blocks else ())

    def within(self, start: int, stop: int) -> Ranges:
        """Return who holds what of the indices from `start` to `stop` alone.

        Example:
            >>> packed = ranges_of([Segment("x")] * 2, {"x": Axis(3)}, 2)
            >>> packed.per_rank, packed.within(3, 6).per_rank
            ((((0, 2), (3, 5)), ((2, 3), (5, 6))), (((0, 2),), ((2, 3),)))
        """
        per_rank = tuple(
            tuple(
                (max(low, start) - start, min(high, stop) - start)
                for low, high in ranges
                if low < stop and high > start
            )
            for ranges in self.per_rank
        )
        inside = [bound for bound in self.block_bounds if start <= bound <= stop]
        bounds = tuple(bound - start for bound in inside)
        return Ranges(stop - start, per_rank, bounds if len(bounds) > 2 else ())

    def repeated(self, count: int) -> Ranges:
        """Return the ranges of a dim that is `count` such dims laid end to end."""
        per_rank = []
        for ranges in self.per_rank:
            owned: list[tuple[int, int]] = []
            for offset in range(0, self.size * count, self.size or 1):
                for start, stop in ranges:
                    _append(owned, (offset + start, offset + stop))
            per_rank.append(tuple(owned))
        inner = self.block_bounds[1:] or (self.size,)
        copies = range(0, self.size * count, self.size or 1)
        ends = tuple(offset + bound for offset in copies for bound in inner)
        bounds = (0, *ends) if len(ends) > 1 else ()
        return Ranges(self.size * count, tuple(per_rank), bounds)


def ranges_of(segments: Segments, axes: Mapping[str, Axis], size: int) -> Ranges:
    """Return who holds what of the dim that `segments` describe, over `size` ranks.

    Raises:
        LayoutError: If a segment names an axis that is not in `axes`, or if the partition
            of its axis leaves a unit to no rank.
    """
    full = as_segments(segments)
    for segment in full:
        if segment.axis not in axes:
            raise LayoutError(
                f"Segment({segment.axis!r}) names an axis that is not declared."
                f" Expected one of {sorted(axes)}."
            )
        _expect_cover(segment.axis, axes[segment.axis], size)
    sizes = [axes[segment.axis].num_units * segment.unit for segment in full]
    per_rank = tuple(_own_ranges(full, axes, size, rank) for rank in range(size))
    bounds = (0, *accumulate(sizes)) if len(sizes) > 1 else ()
    return Ranges(sum(sizes), per_rank, bounds)


def _expect_cover(name: str, axis: Axis, size: int) -> None:
    """Check that every unit has a rank: a gap would be read as an overlap elsewhere."""
    ranges = [axis.range(size, rank) for rank in range(size)]
    reached = 0
    for start, stop in sorted(ranges):
        if start < stop and start <= reached:
            reached = max(reached, stop)
    inside = all(0 <= start <= stop <= axis.num_units for start, stop in ranges)
    if reached != axis.num_units or not inside:
        raise LayoutError(
            f"The partition of axis {name!r} gives {ranges} to {size} ranks. Expected"
            f" ranges inside 0..{axis.num_units} that together hold all"
            f" {axis.num_units} units."
        )


def _own_ranges(
    segments: Sequence[Segment], axes: Mapping[str, Axis], size: int, rank: int
) -> tuple[tuple[int, int], ...]:
    owned: list[tuple[int, int]] = []
    offset = 0
    for segment in segments:
        axis, unit = axes[segment.axis], segment.unit
        start, stop = axis.range(size, rank)
        if stop > start:
            _append(owned, (offset + start * unit, offset + stop * unit))
        offset += axis.num_units * unit
    return tuple(owned)


def _append(owned: list[tuple[int, int]], bounds: tuple[int, int]) -> None:
    """Add `bounds` to `owned`, as part of the last range where it continues that one."""
    if owned and owned[-1][1] == bounds[0]:
        bounds = (owned.pop()[0], bounds[1])
    owned.append(bounds)


def balanced_ranges(dim_size: int, size: int) -> Ranges:
    """Return the `Ranges` of a dim of `dim_size` indices dealt evenly to `size` ranks."""
    return ranges_of("dim", {"dim": Axis(dim_size)}, size)


def ranges_of_lengths(lengths: Sequence[int]) -> Ranges:
    """Return the `Ranges` of shards of the given lengths, laid end to end.

    Example:
        >>> ranges_of_lengths([2, 0, 3]).per_rank
        (((0, 2),), (), ((2, 5),))
    """
    per_rank, start = [], 0
    for length in lengths:
        per_rank.append(((start, start + length),) if length else ())
        start += length
    return Ranges(start, tuple(per_rank))
