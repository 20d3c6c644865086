"""Top classes and accuracy of sharded logits, against a stable sort of the whole ones."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded_cases import marked, randoms
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import groups
from torchshard.errors import LayoutError, ShapeError, ShardedOpError, TargetError
from torchshard.layout import balanced_ranges, ranges_of_lengths
from torchshard.nn.functional import parallel_accuracy, parallel_topk
from torchshard.testing import run_ranks

NAN, INF = float("nan"), float("inf")


def stable_order(x, dim):
    return x.sort(stable=True, dim=dim, descending=True)


def dense_accuracy(x, target, k, ignored=-100):
    dim = 0 if x.dim() == 1 else 1
    best = stable_order(x, dim).indices.narrow(dim, 0, min(k, x.shape[dim]))
    hits = (best == target.unsqueeze(dim)).any(dim)
    live = target != ignored
    return (hits & live).sum().float() / live.sum()


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any),
    num_values=st.integers(1, 6),
    seed=st.integers(0, 2**20),
    inner=st.sampled_from([(), (2,)]),
    special=st.sampled_from([None, NAN, -INF, INF]),
)
def compare_ties(rows, lengths, num_values, seed, inner, special):
    classes = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, classes, *inner)
    x = torch.randint(num_values, shape, generator=generator).double()
    if special is not None:
        x[torch.rand(shape, generator=generator) < 0.3] = special
    target = torch.randint(classes, (rows, *inner), generator=generator)
    y = marked(x, 1, ranges_of_lengths(lengths))
    for k in (1, 2, classes):
        k = min(k, classes)
        best = stable_order(x, 1)
        for logits in (x, y):
            values, indices = parallel_topk(logits, k, 1)
            torch.testing.assert_close(
                values, best.values[:, :k], rtol=0, atol=0, equal_nan=True
            )
            if special is not NAN:  # torch's own topk has no order among nans
                assert torch.equal(indices, best.indices[:, :k])
            (share,) = parallel_accuracy(logits, target, topk=(k,))
            assert share == dense_accuracy(x, target, k), (x, target, k)


def ties():
    compare_ties()


def test_ties_go_to_the_lower_class_at_any_split():
    """Values, indices and accuracy are those of a stable sort; with nan and inf entries too."""
    run_ranks(ties, 3)


def shapes_and_ignored():
    size = groups.get_world_size()
    for shape, ignored in product(((7,), (5, 7), (3, 7, 2), (2, 7, 2, 3)), (-100, 2)):
        dim = 0 if len(shape) == 1 else 1
        x = randoms(shape, 1)
        rows = shape[:dim] + shape[dim + 1 :]
        target = torch.randint(0, 7, rows, generator=torch.Generator().manual_seed(3))
        if target.dim():
            target.view(-1)[0] = ignored
        y = marked(x, dim, balanced_ranges(7, size))
        shares = parallel_accuracy(y, target, (1, 3, 9), ignore_index=ignored)
        for share, k in zip(shares, (1, 3, 9), strict=True):
            assert share == dense_accuracy(x, target, k, ignored), (shape, k)
        half = parallel_accuracy(y.half(), target, ignore_index=ignored)
        assert half[0] == dense_accuracy(x.half(), target, 1, ignored)
        assert torch.equal(
            parallel_topk(y, 2, dim)[1], stable_order(x, dim).indices.narrow(dim, 0, 2)
        )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_shape_and_ignored_rows_match_dense(world_size):
    """(C,), (N, C), (N, C, d1, ...); rows of ignore_index do not count; half precision."""
    run_ranks(shapes_and_ignored, world_size)


def counted():
    y = marked(randoms((6, 8), 1), 1, balanced_ranges(8, 2))
    with CommDebugMode() as mode:
        parallel_accuracy(y, torch.arange(6), topk=(1, 5))
    accuracy = mode.get_total_counts()
    leaf = randoms((6, 8), 1).requires_grad_()
    values, _ = parallel_topk(marked(leaf, 1, balanced_ranges(8, 2)), 3)
    values.sum().backward()
    assert leaf.grad.sum() == 18
    return accuracy


def test_two_collectives_whatever_the_ks():
    """And the values of topk are differentiable."""
    assert run_ranks(counted, 2) == [2, 2]


def wrong_arguments():
    y = marked(randoms((3, 5), 1), 1, balanced_ranges(5, 2))
    rows = marked(randoms((3, 5), 1), 0, balanced_ranges(3, 2))
    target = torch.tensor([0, 4, 2])
    for kind, call in [
        (TargetError, lambda: parallel_accuracy(y, target + 1)),
        (ShapeError, lambda: parallel_accuracy(y, target[:2])),
        (ShapeError, lambda: parallel_accuracy(y, randoms((3, 5), 1))),
        (LayoutError, lambda: parallel_accuracy(y, target, topk=(0,))),
        (ShardedOpError, lambda: parallel_accuracy(rows, target)),
        (ShapeError, lambda: parallel_topk(y, 6)),
        (IndexError, lambda: parallel_topk(y, 1, 2)),
    ]:
        with pytest.raises(kind):
            call()


def test_wrong_arguments_raise_on_all_ranks():
    """Before the first collective."""
    run_ranks(wrong_arguments, 2, timeout_s=20)
