"""any, all, counts, products, variances, scans and picks: of a shard, as of the whole."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_rules
from sharded_cases import close, marked, places, randoms, same_as_dense
from torch import nn
from torchshard.distributed import groups
from torchshard.errors import ShardedOpError, TargetError
from torchshard.layout import balanced_ranges
from torchshard.tensor import whole
from torchshard.testing.ranks import run_ranks

_ = None
NAN = float("nan")
WORLDS = [1, 2, 3]
OVER = {
    "any": lambda x, dim: (x > 0.5).any(dim),
    "all": lambda x, dim: (x > -0.5).all(dim),
    "any, kept": lambda x, dim: torch.any(x > 0.5, dim, keepdim=True),
    "count_nonzero": lambda x, dim: (x > 0).count_nonzero(dim),
    "nansum": lambda x, dim: torch.where(x > 1, NAN, x).nansum(dim),
    "nanmean": lambda x, dim: torch.nanmean(x, dim, keepdim=True),
    "prod": lambda x, dim: x.prod(dim),
    "var": lambda x, dim: x.var(dim),
    "std": lambda x, dim: torch.std(x, dim, keepdim=True),
    "biased": lambda x, dim: x.std(dim, unbiased=False),
    "corrected": lambda x, dim: torch.var(x, dim=dim, correction=0),
    "std_mean": lambda x, dim: list(torch.std_mean(x, dim)),
    "var_mean": lambda x, dim: list(torch.var_mean(x, dim, keepdim=True)),
}
OF_ALL = {
    "any": lambda x: [x.any(), x.all()],
    "prod": torch.prod,
    "var": lambda x: [x.var(), x.std(False), torch.var(x, unbiased=True)],
}


def reductions():
    for place in places(groups.get_world_size()):
        name, shape, *_ = place
        for dim in range(len(shape)):
            if shape[dim] < 2:
                continue
            for label, function in OVER.items():
                case = f"{label} over {dim} on {name}"
                same_as_dense(partial(function, dim=dim), place, case)
        for label, function in OF_ALL.items():
            if 0 not in shape:
                same_as_dense(function, place, f"{label} on {name}")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("world_size", WORLDS)
def test_reductions_match_dense(world_size):
    """Over every dim of every place of a shard, values and gradients."""
    run_ranks(reductions, world_size)


def scans():
    for place in places(groups.get_world_size()):
        name, shape, sharded, ranges = place
        one_range = all(len(bounds) < 2 for bounds in ranges.per_rank)
        for dim in range(len(shape)):
            if dim != sharded or one_range:
                same_as_dense(
                    partial(torch.cumsum, dim=dim), place, f"cumsum of {dim} on {name}"
                )
            if dim == sharded or not shape[dim]:
                continue
            for function in (torch.cumprod, torch.logcumsumexp):
                case = f"{function.__name__} of {dim} on {name}"
                same_as_dense(partial(function, dim=dim), place, case)
            for function in (torch.cummax, torch.cummin, torch.sort, torch.median):
                case = f"{function.__name__} of {dim} on {name}"
                same_as_dense(
                    lambda x, f=function, d=dim: list(f(x, dim=d)), place, case
                )


@pytest.mark.parametrize("world_size", WORLDS)
def test_scans_match_dense(world_size):
    """A running sum over the sharded dim too; sorts along the others."""
    run_ranks(scans, world_size)


IDS = torch.tensor([[0, 4, 2], [3, 3, 1]])
PICKS = {
    "gather": (
        lambda x, ids: x.gather(1, ids),
        [(2, 5), IDS],
        {(1, _), (0, 0), (0, _), (_, 1)},
    ),
    "take_along_dim": (
        lambda x, ids: torch.take_along_dim(x, ids, 1),
        [(2, 5), IDS],
        {(1, _), (0, 0)},
    ),
    "index_select": (
        lambda x, ids: x.index_select(1, ids),
        [(3, 5, 2), IDS.flatten()],
        {(0, _), (1, _), (2, _), (_, 0)},
    ),
    "cosine_similarity": (
        lambda x, y: F.cosine_similarity(x, y, dim=-1),
        [(4, 3), (4, 3)],
        {(0, 0), (1, 1), (1, _)},
    ),
    "pairwise_distance": (F.pairwise_distance, [(4, 3), (4, 3)], {(0, 0), (1, 1)}),
    "softmin": (lambda x: F.softmin(x, 1), [(4, 3)], {(0,), (1,)}),
    "det": (torch.linalg.det, [(4, 3, 3)], {(0,)}),
    "interpolate": (
        lambda x: F.interpolate(x, scale_factor=2),
        [(2, 3, 4)],
        {(0,), (1,)},
    ),
}


def picks():
    expect_rules(PICKS)


@pytest.mark.parametrize("world_size", WORLDS)
def test_picks_of_divided_operands(world_size):
    """By index, by distance, by matrix: right, or refused before any collective."""
    run_ranks(picks, world_size)


def attention_by_steps():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(6, 2, batch_first=True).double()
    dense = copy.deepcopy(module)
    x, cot = randoms((4, 5, 6), 1), randoms((4, 5, 6), 2)
    (dense(x, x, x)[0] * cot).sum().backward()
    for dim in (0, 2):
        module.zero_grad()
        shard = marked(x, dim, balanced_ranges(x.shape[dim], 3))
        result, weights = module(shard, shard, shard)
        close(whole(result), dense(x, x, x)[0], f"output divided at {dim}")
        close(whole(weights), dense(x, x, x)[1], f"weights divided at {dim}")
        (whole(result) * cot).sum().backward()
        for mine, want in zip(module.parameters(), dense.parameters(), strict=True):
            close(mine.grad, want.grad, f"gradient divided at {dim}")


def test_what_torch_composes_runs_by_its_steps():
    """Multi-head attention, which has no rule of its own, on a batch and on features."""
    run_ranks(attention_by_steps, 3)


def refusals():
    x = marked(randoms((4, 6), 1), 1, balanced_ranges(6, 2))
    ids = marked(IDS[:, :2], 0, balanced_ranges(2, 2))
    for call in (
        lambda: x.median(1),
        lambda: x.sort(1),
        lambda: torch.tensor_split(randoms((4, 6), 1), ids[0], 1),
        lambda: torch.det(marked(randoms((4, 4), 1), 1, balanced_ranges(4, 2))),
    ):
        with pytest.raises(ShardedOpError):
            call()
    with pytest.raises(TargetError):
        x.gather(1, torch.full((4, 1), 6))


def test_what_is_refused_is_refused_on_all_ranks():
    """What would compare all of a dim, and indices that are divided themselves."""
    run_ranks(refusals, 2)
