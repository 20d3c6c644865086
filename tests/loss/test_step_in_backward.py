"""The optimizer's step in the middle of backward, against the same optimizer's own step."""

import copy
import gc
import weakref

import pytest
import torch
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torchshard.distributed import collectives, groups
from torchshard.errors import GroupError, StateError
from torchshard.layout import balanced_ranges
from torchshard.nn.functional import parallel_linear_cross_entropy
from torchshard.optim import step_in_backward
from torchshard.testing import run_ranks

CLASSES, FEATURES = 11, 3

OPTIMIZERS = {
    "plain": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "dampened": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "nesterov": (
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
}


def own_weight():
    ranges = balanced_ranges(CLASSES, groups.get_world_size())
    whole = randoms((CLASSES, FEATURES), 2)
    own = collectives.own_shard(whole, 0, ranges, groups.model_group())
    return nn.Parameter(own.clone()), ranges


def loss_of(weight, ranges, seed=0, chunk_bytes=100):
    generator = torch.Generator().manual_seed(seed)
    x = randoms((5, FEATURES), seed).requires_grad_()
    target = torch.randint(0, CLASSES, (5,), generator=generator)
    return parallel_linear_cross_entropy(
        x, weight, target, chunk_bytes=chunk_bytes, ranges=ranges
    )


def steps(kind, options, chunk_bytes):
    """Five steps with a schedule; the second weight is stepped in backward."""
    (first, ranges), (second, _) = own_weight(), own_weight()
    optimizers = [kind([weight], lr=0.1, **options) for weight in (first, second)]
    step_in_backward(optimizers[1], [second])
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    for seed in range(5):
        for weight, optimizer, schedule in zip(
            (first, second), optimizers, schedules, strict=True
        ):
            optimizer.zero_grad()
            loss_of(weight, ranges, seed, chunk_bytes).backward()
            assert (weight.grad is None) == (weight is second)
            optimizer.step()
            schedule.step()
        close(second.detach(), first.detach(), f"{kind}, {options}, {seed}", 1e-13)
    states = [
        each.state[x] for each, x in zip(optimizers, (first, second), strict=True)
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-12)
    optimizers[0].load_state_dict(optimizers[1].state_dict())


def all_optimizers():
    for kind, options in OPTIMIZERS.values():
        for chunk_bytes in (None, 100):
            steps(kind, options, chunk_bytes)


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_and_state_equal_those_of_an_ordinary_step(world_size):
    """Every elementwise optimizer of torch, with schedules, in one chunk and in many."""
    run_ranks(all_optimizers, world_size)


def stepped_weight(kind=torch.optim.SGD, **options):
    weight, ranges = own_weight()
    optimizer = kind([weight], lr=0.1, **options)
    step_in_backward(optimizer, [weight])
    return weight, ranges, optimizer


def test_a_second_backward_before_the_step_raises():
    """Accumulation, or a step that a GradScaler skips, is an error and not another step."""
    weight, ranges, optimizer = stepped_weight()
    loss_of(weight, ranges).backward()
    before = weight.detach().clone()
    with pytest.raises(StateError, match="A second backward came before"):
        loss_of(weight, ranges).backward()
    assert torch.equal(weight.detach(), before)
    optimizer.step()
    loss_of(weight, ranges).backward()
    assert not torch.equal(weight.detach(), before)


def test_a_gradient_by_another_way_raises():
    """A weight that is used elsewhere too would be stepped twice."""
    weight, ranges, _ = stepped_weight()
    weight.square().sum().backward()
    with pytest.raises(StateError, match=r"has a \.grad beside the step"):
        loss_of(weight, ranges).backward()


def test_a_gradient_that_comes_later_raises_at_the_step():
    """A tied embedding's, or a penalty's: the step would be made twice."""
    weight, ranges, optimizer = stepped_weight(momentum=0.9)
    loss_of(weight, ranges).backward()
    weight.square().sum().backward()
    with pytest.raises(StateError, match="it is used elsewhere too"):
        optimizer.step()


def test_a_stale_graph_raises():
    """A loss computed before another step meets a weight that has changed."""
    weight, ranges, optimizer = stepped_weight()
    stale = loss_of(weight, ranges, 1)
    loss_of(weight, ranges).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def test_what_needs_the_whole_gradient_raises():
    """Clipping by the total norm, and a GradScaler, would leave the weight out."""
    weight, ranges, optimizer = stepped_weight()
    loss_of(weight, ranges).backward()
    with pytest.raises(StateError, match="A total norm needs every gradient"):
        ts.nn.utils.clip_grad_norm_([weight], 1.0)
    scaler = ts.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(StateError, match="GradScaler needs every gradient"):
        scaler.step(optimizer)


def test_only_optimizers_that_work_element_by_element_are_taken():
    """And only those that hold the parameter."""
    weight, _ = own_weight()
    with pytest.raises(StateError, match="LBFGS cannot update some rows"):
        step_in_backward(torch.optim.LBFGS([weight]), [weight])
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(StateError, match="does not hold"):
        step_in_backward(other, [weight])
    with pytest.raises(StateError, match="does not hold"):
        step_in_backward(other, nn.Linear(2, 2))


def test_copies_and_later_optimizers_are_on_their_own():
    """A copy has ordinary gradients, and so has a weight whose optimizer is gone."""
    weight, ranges, optimizer = stepped_weight(momentum=0.9)
    twin = copy.deepcopy(weight)
    loss_of(twin, ranges).backward()
    assert twin.grad is not None
    alive = weakref.ref(optimizer)
    loss_of(weight, ranges).backward()
    assert weight.grad is None
    del optimizer
    gc.collect()
    assert alive() is None
    loss_of(weight, ranges).backward()
    assert weight.grad is not None
    replaced = torch.optim.SGD([weight], lr=0.1)
    weight.grad = None
    step_in_backward(replaced, [weight])
    loss_of(weight, ranges).backward()
    assert weight.grad is None


def replicated():
    ts.init_process_group(1)
    with pytest.raises(GroupError, match="replicated over 2 data-parallel groups"):
        stepped_weight()


def test_weights_replicated_over_data_parallel_groups_are_refused():
    """Their gradients must be averaged before a step."""
    run_ranks(replicated, 2)
