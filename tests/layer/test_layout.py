"""Layouts: which indices each rank owns."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchshard.errors import LayoutError
from torchshard.layout import (
    Axis,
    Ranges,
    Segment,
    Shard,
    as_segments,
    balanced,
    balanced_ranges,
    covering,
    ranges_of,
    ranges_of_lengths,
)

SIZES = st.integers(1, 7)
UNITS = st.integers(0, 40)
SEGMENTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=4
)


def indices(ranges, rank):
    bounds = ranges.per_rank[rank]
    return [index for start, stop in bounds for index in range(start, stop)]


@given(UNITS, SIZES)
def test_balanced_shards_cover_every_unit_once_and_differ_by_at_most_one(units, size):
    """Ranks hold consecutive units, each exactly once, the first ranks one more."""
    bounds = [balanced(units, size, rank) for rank in range(size)]
    lengths = [stop - start for start, stop in bounds]
    assert [unit for start, stop in bounds for unit in range(start, stop)] == list(
        range(units)
    )
    assert sorted(lengths, reverse=True) == lengths
    assert max(lengths) - min(lengths) <= 1


@given(SEGMENTS, SIZES)
def test_packed_segments_are_each_cut_by_units(segments, size):
    """A rank holds, of every segment in turn, whole units of its own share, and none twice."""
    axes = {f"axis{i}": Axis(units) for i, (units, _) in enumerate(segments)}
    full = [Segment(f"axis{i}", unit) for i, (_, unit) in enumerate(segments)]
    ranges = ranges_of(full, axes, size)
    total = sum(units * unit for units, unit in segments)
    assert ranges.size == total
    held = [index for rank in range(size) for index in indices(ranges, rank)]
    assert sorted(held) == list(range(total))
    for rank in range(size):
        expected, offset = [], 0
        for units, unit in segments:
            start, stop = balanced(units, size, rank)
            expected += range(offset + start * unit, offset + stop * unit)
            offset += units * unit
        assert indices(ranges, rank) == expected
        assert ranges.length(rank) == len(expected)
        assert all(start < stop for start, stop in ranges.per_rank[rank])
    assert not ranges.overlaps


@given(st.integers(1, 6), st.integers(1, 5), SIZES)
def test_covering_axis_gives_each_rank_all_that_its_units_need(kv_heads, ratio, size):
    """Unit u of the covering axis is held by exactly the ranks that hold a unit it serves."""
    queries = Axis(kv_heads * ratio)
    heads = covering(queries, ratio)
    assert heads.num_units == kv_heads
    for rank in range(size):
        start, stop = queries.range(size, rank)
        needed = sorted({query // ratio for query in range(start, stop)})
        first, last = heads.range(size, rank)
        assert list(range(first, last)) == needed
    ranges = ranges_of("kv", {"kv": heads}, size)
    assert ranges.overlaps == (sum(ranges.lengths) > kv_heads)


@given(UNITS, SIZES, st.integers(1, 5))
def test_scaled_ranges_are_those_of_a_larger_unit(units, size, factor):
    """Every index becoming `factor` indices equals a segment of that unit."""
    scaled = balanced_ranges(units, size).scaled(factor)
    assert scaled == ranges_of(Segment("x", factor), {"x": Axis(units)}, size)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_ranges_of_lengths_are_contiguous(lengths):
    """Given lengths are laid end to end; offsets are their running sums."""
    ranges = ranges_of_lengths(lengths)
    assert ranges.lengths == lengths
    assert ranges.is_contiguous
    assert [ranges.offset(r) for r in range(len(lengths))] == [
        sum(lengths[:r]) for r in range(len(lengths))
    ]


def test_contiguous_means_one_range_a_rank_in_rank_order():
    """Packed, reversed and overlapping ranges are not contiguous; fewer units than ranks are."""
    packed = ranges_of([Segment("x"), Segment("x")], {"x": Axis(4)}, 2)
    assert packed.per_rank == (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    assert not packed.is_contiguous
    assert not Ranges(4, (((2, 4),), ((0, 2),))).is_contiguous
    assert not Ranges(3, (((0, 2),), ((1, 3),))).is_contiguous
    assert balanced_ranges(2, 4).is_contiguous
    assert balanced_ranges(0, 3).is_contiguous
    assert ranges_of([Segment("x"), Segment("x")], {"x": Axis(4)}, 1).is_contiguous


def test_segments_may_be_a_name_one_segment_or_several():
    """All spellings of a dim mean the same tuple of segments."""
    assert as_segments("x") == as_segments(Segment("x")) == as_segments([Segment("x")])
    assert Shard(0, "x") == Shard(0, [Segment("x")])
    assert Shard(1, ["x", Segment("y", 2)]).segments == (Segment("x"), Segment("y", 2))


def gap(num_units, size, rank):
    return (0, 2) if rank == 0 else (3, num_units)


def twice_and_short(num_units, size, rank):
    return (0, num_units - 1)


def beyond(num_units, size, rank):
    return (0, num_units + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: covering(Axis(6), 4),
            "ratio=4 does not divide the 6 units of the axis. Expected a divisor: each"
            " covering unit serves the same number of units.",
        ),
        (
            lambda: ranges_of("heads", {"x": Axis(2), "a": Axis(3)}, 2),
            "Segment('heads') names an axis that is not declared."
            " Expected one of ['a', 'x'].",
        ),
        (
            lambda: Axis(-1),
            "num_units=-1 is negative. Expected 0 or more units.",
        ),
        (
            lambda: Segment("x", 0),
            "unit=0 in Segment('x') is less than 1. Expected the number of elements that"
            " each unit of the axis has.",
        ),
        (
            lambda: ranges_of("x", {"x": Axis(5, gap)}, 2),
            "The partition of axis 'x' gives [(0, 2), (3, 5)] to 2 ranks. Expected"
            " ranges inside 0..5 that together hold all 5 units.",
        ),
        (
            lambda: ranges_of("x", {"x": Axis(4, twice_and_short)}, 2),
            "The partition of axis 'x' gives [(0, 3), (0, 3)] to 2 ranks. Expected"
            " ranges inside 0..4 that together hold all 4 units.",
        ),
        (
            lambda: ranges_of("x", {"x": Axis(1, beyond)}, 2),
            "The partition of axis 'x' gives [(0, 2), (0, 2)] to 2 ranks. Expected"
            " ranges inside 0..1 that together hold all 1 units.",
        ),
    ],
)
def test_errors_say_what_was_expected(make, message):
    """An inconsistent declaration is refused with the value and the remedy."""
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        make()
