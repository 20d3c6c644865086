"""Margins and sampled classes: what the zoo's own tests of the margin heads do not cover."""

import math

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torchshard.distributed import collectives, groups
from torchshard.errors import LayoutError, ShapeError, TargetError
from torchshard.layout import balanced_ranges
from torchshard.loss import (
    Margin,
    TargetMargin,
    margin_cross_entropy,
    parallel_margin_cross_entropy,
)
from torchshard.loss.sampling import sampled
from torchshard.nn.functional import parallel_accuracy, parallel_linear_cross_entropy
from torchshard.optim import step_in_backward
from torchshard.tensor.sharded import Sharding
from torchshard.testing import run_ranks

from layer_zoo import ParallelArcFace

MARGINS = [
    Margin(added=0.5),
    Margin(added=0.5, easy=True),
    Margin(subtracted=0.35, scale=30.0),
    Margin(multiplied=1.35),
    Margin(1.2, 0.3, 0.1, 10.0),
]


@pytest.mark.parametrize("margin", MARGINS)
def test_the_slope_is_the_derivative(margin):
    """By central differences, on both sides of where the margin is continued."""
    cosine = torch.linspace(-0.99, 0.99, 101, dtype=torch.float64)
    step = 1e-6
    numeric = (margin.of(cosine + step) - margin.of(cosine - step)) / (2 * step)
    last = math.cos((math.pi - margin.added) / margin.multiplied)
    smooth = ((cosine - last).abs() > 1e-3) & (cosine.abs() > 1e-3)
    torch.testing.assert_close(
        margin.slope(cosine)[smooth], numeric[smooth], rtol=1e-5, atol=1e-6
    )
    leaf = cosine.clone().requires_grad_()
    (grad,) = torch.autograd.grad(margin.of(leaf).sum(), leaf)
    torch.testing.assert_close(grad[smooth], numeric[smooth], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("margin", MARGINS)
def test_the_slope_that_is_worked_out_is_that_of_the_formula(margin):
    """A margin that has no formula for its slope gets the same, under no_grad too."""
    cosine = torch.linspace(-0.99, 0.99, 101, dtype=torch.float64)
    with torch.no_grad():
        derived = TargetMargin.slope(margin, cosine)
    torch.testing.assert_close(derived, margin.slope(cosine), rtol=1e-12, atol=1e-12)
    assert not derived.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_slope_is_finite_at_one_and_minus_one(dtype):
    """And beyond, where rounding may carry a cosine."""
    ends = torch.tensor([1.0, 1.0 + 1e-6, -1.0, -1.0 - 1e-6], dtype=dtype)
    for margin in MARGINS:
        assert margin.slope(ends).isfinite().all()
        assert margin.of(ends).isfinite().all()


def test_the_margin_never_raises_the_targets_cosine():
    """For the margins of one or other kind, over all angles; and it falls as the angle grows."""
    cosine = torch.linspace(-1, 1, 1001, dtype=torch.float64)
    for margin in MARGINS:
        phi = margin.of(cosine)
        assert (phi <= cosine + 1e-12).all(), margin
        if not margin.easy:
            assert (phi.diff() > -1e-9).all(), margin


@pytest.mark.parametrize(
    "wrong", [{"multiplied": 0.5}, {"added": -0.1}, {"added": 3.2}, {"scale": 0.0}]
)
def test_margins_out_of_range_raise(wrong):
    """With all three values in the text."""
    with pytest.raises(LayoutError, match="expected a factor of at least 1"):
        Margin(**wrong)


CLASSES, FEATURES, ROWS = 23, 4, 6


def shards():
    ranges = balanced_ranges(CLASSES, groups.get_world_size())
    whole = randoms((CLASSES, FEATURES), 2)
    own = collectives.own_shard(whole, 0, ranges, groups.model_group())
    return whole, nn.Parameter(own.clone()), ranges


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    x = randoms((ROWS, FEATURES), seed).requires_grad_()
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[0] = -100
    return x, target


def kept_classes(target, ranges, rate, seed):
    """The classes that the ranks draw after `seed`, whole."""
    torch.manual_seed(seed)
    sharding = Sharding(1, ranges, groups.model_group())
    rows = sampled(target.reshape(1, -1), sharding, rate).rows
    marks = torch.zeros(CLASSES)
    marks[rows + ranges.offset(sharding.group.rank)] = 1
    return collectives.all_reduce(marks, sharding.group).nonzero().flatten()


def dense_sampled(x, whole, target, margin, kept):
    """The loss over the kept classes alone, in dense torch."""
    place = torch.full((CLASSES,), -100)
    place[kept] = torch.arange(len(kept))
    cosines = F.linear(F.normalize(x), F.normalize(whole[kept]))
    targets = torch.where(target == -100, -100, place[target.clamp(0)])
    criterion = ts.loss.Criterion()
    return margin_cross_entropy(cosines, targets, margin, criterion)


def sampled_loss():
    whole, weight, ranges = shards()
    margin = Margin(added=0.4, scale=8.0)
    for seed, rate, sparse in ((0, 0.5, False), (1, 0.1, False), (2, 0.4, True)):
        x, target = batch(seed)
        kept = kept_classes(target, ranges, rate, seed)
        dense_x = x.detach().clone().requires_grad_()
        dense_w = whole.clone().requires_grad_()
        want = dense_sampled(dense_x, dense_w, target, margin, kept)
        want.backward()
        torch.manual_seed(seed)
        weight.grad = None
        loss = parallel_margin_cross_entropy(
            x, weight, target, margin, sample_rate=rate, sparse=sparse, chunk_bytes=100
        )
        loss.backward()
        case = f"{seed}, {rate}, {sparse}"
        assert len(kept) < CLASSES
        assert set(target[1:].tolist()) <= set(kept.tolist())
        assert weight.grad.is_sparse == sparse
        close(loss.detach(), want.detach(), case, 1e-12)
        close(x.grad, dense_x.grad, case, 1e-12)
        own = collectives.own_shard(dense_w.grad, 0, ranges, groups.model_group())
        close(weight.grad.to_dense(), own, case, 1e-12)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sampled_classes_give_the_exact_loss_of_those_classes(world_size):
    """All targets are kept; gradients of centres that were not drawn are 0 or absent."""
    run_ranks(sampled_loss, world_size)


def untouched_rows():
    margin = Margin(added=0.4, scale=8.0)
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        _, weight, ranges = shards()
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {"weight_decay": 0.1}
        optimizer = kind([weight], lr=0.1, **extra)
        step_in_backward(optimizer, [weight])
        for seed in range(4):
            x, target = batch(seed)
            kept = kept_classes(target, ranges, 0.3, seed)
            first = ranges.offset(groups.get_rank())
            drawn = torch.zeros(len(weight), dtype=torch.bool)
            mine = kept[(kept >= first) & (kept < first + len(weight))] - first
            drawn[mine] = True
            before = weight.detach().clone()
            states = {
                name: value.clone()
                for name, value in optimizer.state[weight].items()
                if value.dim()
            }
            torch.manual_seed(seed)
            parallel_margin_cross_entropy(
                x, weight, target, margin, sample_rate=0.3, chunk_bytes=100
            ).backward()
            optimizer.step()
            assert torch.equal(weight[~drawn], before[~drawn])
            assert not (weight[drawn] == before[drawn]).all(1).any()
            for name, value in states.items():
                assert torch.equal(optimizer.state[weight][name][~drawn], value[~drawn])


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_were_not_drawn_keep_weight_and_optimizer_state(world_size):
    """Also with momentum and weight decay, where the step is made in backward."""
    run_ranks(untouched_rows, world_size)


def drawn_streams():
    before = torch.get_rng_state()
    x, target = batch(0)
    _, weight, _ = shards()
    torch.manual_seed(5)
    parallel_margin_cross_entropy(x, weight, target, Margin(added=0.5), sample_rate=0.3)
    after = torch.rand(1).item()
    torch.set_rng_state(before)
    return after


def test_the_common_random_stream_stays_common():
    """Ranks with uneven shards draw different numbers of lots, and go on alike."""
    results = run_ranks(drawn_streams, 3)
    assert len(set(results)) == 1


def wrong_arguments():
    _, weight, _ = shards()
    x, target = batch(0)
    arc = Margin(added=0.5)
    for kind, call in [
        (
            LayoutError,
            lambda: parallel_margin_cross_entropy(
                x, weight, target, arc, sample_rate=0.0
            ),
        ),
        (
            LayoutError,
            lambda: parallel_margin_cross_entropy(
                x, weight, target, arc, sample_rate=1.5
            ),
        ),
        (
            ShapeError,
            lambda: parallel_margin_cross_entropy(x[:, :2], weight, target, arc),
        ),
        (
            ShapeError,
            lambda: parallel_margin_cross_entropy(
                x, weight, randoms((ROWS, CLASSES), 1), arc
            ),
        ),
        (
            IndexError,
            lambda: parallel_margin_cross_entropy(x, weight, target + CLASSES, arc),
        ),
        (
            LayoutError,
            lambda: parallel_margin_cross_entropy(x.float(), weight, target, arc),
        ),
    ]:
        with pytest.raises(kind):
            call()


def test_wrong_arguments_raise_on_all_ranks():
    """Before the first collective."""
    run_ranks(wrong_arguments, 2, timeout_s=20)


def evaluation():
    torch.manual_seed(0)
    head = ParallelArcFace(FEATURES, CLASSES, scale=4.0).double()
    x, target = batch(3)
    cosines = head(x)
    weight = ts.collect_state_dict(head)["weight"]
    want = 4 * F.linear(F.normalize(x), F.normalize(weight))
    close(ts.distributed.gather(cosines).detach(), want.detach(), "cosines", 1e-12)
    hits = (want.argmax(1) == target)[1:].float().mean()
    assert torch.allclose(parallel_accuracy(cosines, target)[0], hits)


@pytest.mark.parametrize("world_size", [1, 3])
def test_without_a_target_a_head_gives_its_cosines(world_size):
    """Sharded by class, for accuracy and topk."""
    run_ranks(evaluation, world_size)


def cosines_of_more_dims():
    x = randoms((3, 4, FEATURES), 3)
    for dim in (1, 0):
        torch.manual_seed(0)
        head = ParallelArcFace(FEATURES, CLASSES, scale=4.0, dim=dim).double()
        cosines = ts.distributed.gather(head(x)) if dim else head(x)
        weight = ts.collect_state_dict(head)["weight"]
        want = 4 * F.linear(F.normalize(x, dim=-1), F.normalize(weight))
        close(cosines.detach(), want.detach(), f"dim={dim}", 1e-12)


@pytest.mark.parametrize("world_size", [1, 3])
def test_cosines_of_inputs_with_more_dims(world_size):
    """Positions between batch and features, where classes are divided and where features are."""
    run_ranks(cosines_of_more_dims, world_size)


def refusals_where_features_are_divided():
    head = ParallelArcFace(FEATURES, CLASSES, dim=0)
    if groups.get_rank() > 0:
        return
    x = torch.randn(ROWS, FEATURES)
    for target in (
        torch.ones(ROWS),
        torch.zeros(ROWS - 1, dtype=torch.long),
        torch.full((ROWS,), CLASSES),
    ):
        with pytest.raises((ShapeError, TargetError)):
            head(x, target)
    with pytest.raises(ShapeError, match="3 dims"):
        head(x.view(2, 3, FEATURES), torch.zeros(2, 3, dtype=torch.long))
    with pytest.raises(LayoutError, match=r"sample_rate=0\.5 with dim=0"):
        ParallelArcFace(FEATURES, CLASSES, dim=0, sample_rate=0.5)


def test_where_features_are_divided_targets_are_checked_before_the_collective():
    """One rank alone meets the error, and waits for no other. So is a sample of classes."""
    run_ranks(refusals_where_features_are_divided, 2, timeout_s=20)


def pooled_batches():
    """Each rank has its own samples; the head pools them, and the loss is that of all."""
    size, rank = groups.get_world_size(), groups.get_rank()
    torch.manual_seed(0)
    head = ParallelArcFace(FEATURES, CLASSES, scale=4.0).double()
    head.gather_batch = True
    x, target = batch(3)
    mine = x.detach().tensor_split(size)[rank].clone().requires_grad_()
    loss = head(mine, target.tensor_split(size)[rank])
    loss.backward()
    alone = ParallelArcFace(
        FEATURES, CLASSES, scale=4.0, group=ts.ShardGroup()
    ).double()
    alone.load_state_dict(ts.collect_state_dict(head))
    want = alone(x, target)
    want.backward()
    close(loss.detach(), want.detach(), "loss", 1e-12)
    close(mine.grad, size * x.grad.tensor_split(size)[rank], "input", 1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_head_pools_the_samples_of_data_parallel_ranks(world_size):
    """The input's gradient carries the factor that a data-parallel wrapper's mean takes off."""
    run_ranks(pooled_batches, world_size)


def confident(loss, forward, backward):
    x, target = randoms((32, 64), 3).float(), torch.arange(32) % 20
    weight = randoms((20, 64), 4).float()
    x = (weight[target] + 0.1 * x).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=forward):
        value = loss(x, weight, target)
    with torch.autocast("cpu", torch.bfloat16, enabled=backward):
        value.backward()
    return x.grad


@pytest.mark.parametrize("forward", [False, True])
def test_backward_computes_the_logits_of_forward_whatever_autocast_is(forward):
    """Else p does not sum to 1, and rows that are right never stop being trained."""
    margin = Margin(subtracted=0.0, scale=64.0)

    def linear(x, weight, target):
        return parallel_linear_cross_entropy(x, weight, target, chunk_bytes=512)

    def head(x, weight, target):
        return parallel_margin_cross_entropy(x, weight, target, margin)

    for loss in (linear, head):
        same, other = (
            confident(loss, forward, backward) for backward in (forward, not forward)
        )
        assert torch.equal(same, other)
        assert same.norm() < 1e-2


def test_under_autocast_products_are_in_its_dtype():
    """Lengths are taken in float32, what is multiplied is rounded, as for a linear layer."""
    x, weight = randoms((32, 64), 3).float(), randoms((20, 64), 4).float()
    target, margin = torch.arange(32) % 20, Margin(subtracted=0.0, scale=64.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = parallel_margin_cross_entropy(x, weight, target, margin)
        logits = F.linear(64 * F.normalize(x), F.normalize(weight))
    rounded = F.cross_entropy(logits.float(), target)
    exact = F.cross_entropy(F.linear(64 * F.normalize(x), F.normalize(weight)), target)
    assert loss.dtype == torch.float32
    assert (rounded - exact).abs() > 1e-4
    assert (loss - rounded).abs() < (rounded - exact).abs() / 10
