"""Raw collectives: out of place, on any dim, for any strides and sizes."""

from functools import partial

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import collectives, groups
from torchshard.layout import (
    Axis,
    Segment,
    balanced_ranges,
    covering,
    ranges_of,
    ranges_of_lengths,
)
from torchshard.testing.ranks import run_ranks

WORLDS = [1, 2, 4]
DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def exact(actual, expected, case):
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=0, msg=lambda text: f"{case}: {text}"
    )


def numbers(shape, seed, dtype):
    """Small integers: sums of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def awkward(x):
    """The same values lying in memory in every way, by name."""
    yield "contiguous", x.clone()
    yield "transposed", x.mT.contiguous().mT
    wide = x.new_empty(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    yield "every other column", wide[..., ::2]
    yield "offset", torch.cat([x[:1], x])[1:]
    if x.shape[0]:
        yield "expanded", x[:1].expand(x.shape)


def kept(call, x, case):
    """Call and check that the argument keeps its bits, also those between its elements."""
    storage = x.untyped_storage().clone()
    result = call(x)
    assert x.untyped_storage().tolist() == storage.tolist(), (
        f"{case} wrote to its argument"
    )
    return result


def split_kinds(length, size):
    yield "balanced", balanced_ranges(length, size)
    lengths = [0] * size
    lengths[size // 2] = length
    yield "one rank has all", ranges_of_lengths(lengths)
    if length % 2 == 0:
        axes = {"x": Axis(length // 2)}
        yield "packed", ranges_of([Segment("x")] * 2, axes, size)
        axes = {"x": covering(Axis(2 * length), 2)}
        yield "overlapping", ranges_of("x", axes, size)


def parts_of(whole, dim, ranges, rank):
    index = [i for start, stop in ranges.per_rank[rank] for i in range(start, stop)]
    return whole.index_select(dim, torch.tensor(index, dtype=torch.long))


def sums_and_extremes():
    group = groups.model_group()
    for dtype in DTYPES:
        for shape in [(3, 4), (0, 4), (3, 0)]:
            all_x = [numbers(shape, r, dtype) for r in range(group.size)]
            for name, x in awkward(all_x[group.rank]):
                others = [dict(awkward(other))[name] for other in all_x]
                case = f"{dtype} {shape} {name}"
                total = kept(partial(collectives.all_reduce, group=group), x, case)
                exact(total, torch.stack(others).sum(0).to(dtype), case)
                most = kept(
                    partial(collectives.all_reduce, group=group, op="max"), x, case
                )
                exact(most, torch.stack(others).amax(0), case)
                rows = kept(partial(collectives.stack, group=group), x, case)
                exact(rows, torch.stack(others), case)
                last = group.size - 1
                sent = kept(
                    partial(collectives.broadcast, group=group, source=last), x, case
                )
                exact(sent, others[last].contiguous(), case)


@pytest.mark.parametrize("world_size", WORLDS)
def test_reductions_broadcast_and_stack_take_any_strides(world_size):
    """T16: sum, maximum, broadcast and stack equal torch's for every dtype and layout."""
    run_ranks(sums_and_extremes, world_size)


def shards_come_and_go():
    group = groups.model_group()
    size, rank = group.size, group.rank
    for dtype in DTYPES[:3]:
        for shape in [(4, 5, 6), (6, 0, 4)]:
            for dim in (0, 1, 2, -1, -3):
                for split, ranges in split_kinds(shape[dim], size):
                    whole = numbers(shape, 9, dtype)
                    mine = parts_of(whole, dim, ranges, rank)
                    all_x = [numbers(shape, r, dtype) for r in range(size)]
                    case = f"{dtype} {shape} dim {dim} {split}"
                    kw = {"dim": dim, "ranges": ranges, "group": group}
                    for name, x in awkward(mine):
                        if name == "expanded":
                            continue
                        gathered = kept(
                            partial(collectives.all_gather, **kw),
                            x,
                            f"{case} {name}",
                        )
                        exact(gathered, whole, f"gather {case} {name}")
                    for name, x in awkward(all_x[rank]):
                        others = [dict(awkward(other))[name] for other in all_x]
                        summed = torch.stack(others).sum(0).to(dtype)
                        part = kept(
                            partial(collectives.reduce_scatter, **kw),
                            x,
                            f"{case} {name}",
                        )
                        exact(
                            part,
                            parts_of(summed, dim, ranges, rank),
                            f"reduce_scatter {case} {name}",
                        )
                    added = collectives.sum_into_whole(mine, dim, ranges, group)
                    holders = torch.zeros(shape[dim], dtype=torch.long)
                    for bounds in ranges.per_rank:
                        for start, stop in bounds:
                            holders[start:stop] += 1
                    times = holders.reshape([-1, *[1] * (2 - dim % 3)])
                    exact(added, (whole * times).to(dtype), f"sum {case}")


@pytest.mark.parametrize("world_size", WORLDS)
def test_gather_and_reduce_scatter_take_any_dim_split_and_strides(world_size):
    """R11, T17: unequal, empty, packed and overlapping shards, whole and back, exactly."""
    run_ranks(shards_come_and_go, world_size)


def all_to_all_moves():
    group = groups.model_group()
    size, rank = group.size, group.rank
    for dtype in DTYPES[:3]:
        for shape, split_dim, join_dim in [((5, 3, 4), 0, 2), ((2, 6, 0), -2, 0)]:
            for _, join in split_kinds(shape[join_dim], size):
                if join.overlaps:
                    continue
                split = balanced_ranges(shape[split_dim], size)
                whole = numbers(shape, 2, dtype)
                swap = partial(
                    collectives.all_to_all,
                    split_dim=split_dim,
                    split_ranges=split,
                    join_dim=join_dim,
                    join_ranges=join,
                    group=group,
                )
                for name, x in awkward(parts_of(whole, join_dim, join, rank)):
                    if name == "expanded":
                        continue
                    case = f"{dtype} {shape} {name}"
                    moved = kept(
                        swap,
                        x,
                        case,
                    )
                    exact(moved, parts_of(whole, split_dim, split, rank), case)


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_to_all_takes_any_dims_and_sizes(world_size):
    """The whole of one dim comes together while another is dealt out, exactly."""
    run_ranks(all_to_all_moves, world_size)


def counts():
    group = groups.model_group()
    x = torch.ones(4, 4)
    found = {}
    for name, ranges in split_kinds(4, group.size):
        own = parts_of(x, 1, ranges, group.rank)
        with CommDebugMode() as gather:
            collectives.all_gather(own, 1, ranges, group)
        with CommDebugMode() as scatter:
            collectives.reduce_scatter(x, 1, ranges, group)
        found[name] = (gather.get_total_counts(), scatter.get_total_counts())
    return found


def test_one_collective_each_whatever_the_sizes():
    """Padding and trimming cost no second collective."""
    assert set(run_ranks(counts, 3)[0].values()) == {(1, 1)}


def equal_rows_are_not_copied():
    group = groups.model_group()
    ranges = balanced_ranges(4, group.size)
    whole = collectives.all_gather(torch.ones(2, 3), 0, ranges, group)
    return whole.untyped_storage().nbytes() == whole.nbytes and whole._base is not None


def test_equal_rows_are_gathered_into_place():
    """Equal shards of dim 0 are a view of what the collective wrote: no second copy."""
    assert run_ranks(equal_rows_are_not_copied, 2) == [True, True]


def middle_ranks_only():
    group = groups.model_group()
    x = torch.full((2,), float(group.rank + 1))
    first = collectives.broadcast(x, group, 0)
    last = collectives.broadcast(x, group, 1)
    rows = collectives.stack(x, group)
    return first.tolist(), last.tolist(), rows.tolist()


def test_sources_are_ranks_of_the_group():
    """T19, R3: in the second of two groups, source 0 is the world's rank 2."""
    results = run_ranks(middle_ranks_only, 4, group_size=2)
    assert results == [([1.0] * 2, [2.0] * 2, [[1.0] * 2, [2.0] * 2])] * 4
