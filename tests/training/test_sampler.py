"""Ranks of one model group draw the same samples, groups draw disjoint ones (T67)."""

import pytest
import torch
import torchshard as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler
from torchshard.testing import run_ranks
from torchshard.utils.data import DistributedGroupSampler

SIZES = st.integers(1, 40)
GROUPS = st.integers(1, 9)


def samplers(size, num_groups, **options):
    return [
        DistributedGroupSampler(range(size), num_groups, index, **options)
        for index in range(num_groups)
    ]


@given(
    SIZES, GROUPS, st.booleans(), st.integers(0, 3), st.integers(0, 3), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_t67_equals_torchs_sampler_over_the_groups(
    size, num_groups, shuffle, seed, epoch, drop_last
):
    """T67: each group draws what torch's DistributedSampler draws for its index."""
    for index, sampler in enumerate(
        samplers(size, num_groups, shuffle=shuffle, seed=seed, drop_last=drop_last)
    ):
        torchs = DistributedSampler(
            range(size), num_groups, index, shuffle, seed, drop_last
        )
        sampler.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(sampler) == list(torchs)
        assert len(sampler) == len(torchs) == len(list(sampler))


@given(SIZES, GROUPS, st.booleans(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_t67_groups_cover_the_data_and_do_not_overlap(size, num_groups, shuffle, epoch):
    """T67: every sample is drawn; a second time only to fill up the last round."""
    drawn = []
    for sampler in samplers(size, num_groups, shuffle=shuffle):
        sampler.set_epoch(epoch)
        drawn += list(sampler)
    rounds = -(-size // num_groups)
    assert len(drawn) == rounds * num_groups
    assert set(drawn) == set(range(size))
    if size % num_groups == 0:
        assert len(set(drawn)) == len(drawn)


@given(SIZES, GROUPS, st.booleans(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_t67_drop_last_repeats_nothing(size, num_groups, shuffle, epoch):
    """T67: with drop_last no sample is drawn twice, and fewer than a round are left out."""
    drawn = []
    for sampler in samplers(size, num_groups, shuffle=shuffle, drop_last=True):
        sampler.set_epoch(epoch)
        drawn += list(sampler)
    assert len(set(drawn)) == len(drawn)
    assert size - len(drawn) < num_groups


def test_epochs_are_shuffled_anew():
    """set_epoch changes the order, alike for all groups; the same epoch repeats it."""
    first, again = samplers(20, 2)[0], samplers(20, 2)[0]
    before = list(first)
    first.set_epoch(1)
    assert list(first) != before
    again.set_epoch(1)
    assert list(again) == list(first)
    other_seed = samplers(20, 2, seed=5)[0]
    assert list(other_seed) != before


def test_an_index_out_of_range():
    """torch's own error names the group that does not exist."""
    with pytest.raises(ValueError, match="Invalid rank 2"):
        DistributedGroupSampler(range(5), 2, 2)


def drawn_by_rank(group_size):
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)  # the seeds of the ranks do not matter
    sampler = DistributedGroupSampler(range(11), seed=3)
    sampler.set_epoch(2)
    loader = DataLoader(list(range(11)), batch_size=4, sampler=sampler)
    torchs = DistributedSampler(
        range(11),
        torch.distributed.get_world_size() // group_size,
        rank // group_size,
        seed=3,
    )
    torchs.set_epoch(2)
    batches = [batch.tolist() for batch in loader]
    assert [x for batch in batches for x in batch] == list(torchs)
    assert ts.distributed.get_world_size() == group_size
    return batches


@pytest.mark.parametrize(("world_size", "group_size"), [(4, 2), (4, 4), (3, 1), (2, 2)])
def test_t67_ranks_of_a_group_see_the_same_batches(world_size, group_size):
    """T67: found from the initialised groups, whatever the ranks' random seeds."""
    drawn = run_ranks(drawn_by_rank, world_size, group_size, group_size=group_size)
    for rank, batches in enumerate(drawn):
        assert batches == drawn[rank // group_size * group_size]
    seen = [x for batches in drawn[::group_size] for batch in batches for x in batch]
    assert set(seen) == set(range(11))


def test_in_one_process_it_draws_everything():
    """Without any group there is one group."""
    assert sorted(DistributedGroupSampler(range(7))) == list(range(7))
