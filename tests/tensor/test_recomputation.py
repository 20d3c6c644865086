"""Checkpoints inside checkpoints: what runs again finds its inputs marked as it did first."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torchshard.tensor import ShardedTensor, whole
from torchshard.testing.ranks import run_ranks

INNER = {
    "softmax": lambda y: y.softmax(-1),
    "a mean": lambda y: y * y.mean(-1, keepdim=True),
    "a sum of squares": lambda y: (y * y).sum(-1, keepdim=True) * y,
    "an extreme": lambda y: y * y.softmax(-1).max(-1, keepdim=True).values,
    "another checkpoint": lambda y: checkpoint(
        lambda z: z.softmax(-1), y * 2, use_reentrant=False
    ),
}


def models():
    for plan in (None, {"0": "column", "2": "row"}):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3)).double()
        yield ts.parallelize(model, plan) if plan else model


def nested():
    for (case, inner), outer_mode, inner_mode in product(
        INNER.items(), (False, True), (False, True)
    ):
        grads = []
        for model in models():
            x = randoms((5, 4), 1).requires_grad_()

            def block(v, model=model, inner=inner, mode=inner_mode):
                return checkpoint(inner, model[0](v), use_reentrant=mode)

            y = whole(checkpoint(block, x, use_reentrant=outer_mode))
            (y * randoms((5, 7), 2)).sum().backward()
            bias = model[0].bias.grad
            if isinstance(model[0], ts.ParallelLayer):
                bias = ts.state.gathered(bias, model[0], "bias")
            grads.append((x.grad, bias))
        for mine, dense in zip(*grads[::-1], strict=True):
            close(mine, dense, f"{case}, reentrant: {outer_mode}, inside {inner_mode}")


def layers_inside():
    """The input of an inner row layer is a shard; a sequence of checkpoints in one."""
    for run in (
        lambda model, x: checkpoint(
            lambda v: checkpoint(model[2], F.gelu(model[0](v)), use_reentrant=False),
            x,
            use_reentrant=False,
        ),
        lambda model, x: checkpoint(
            lambda v: checkpoint_sequential(model, 3, v, use_reentrant=False),
            x,
            use_reentrant=False,
        ),
    ):
        grads = []
        for model in models():
            x = randoms((5, 4), 1).requires_grad_()
            run(model, x).square().sum().backward()
            grads.append(x.grad)
        close(grads[1], grads[0], "layers inside")


@pytest.mark.parametrize("body", [nested, layers_inside])
def test_checkpoints_inside_checkpoints(body):
    """Every mode outside and inside, and three of them."""
    run_ranks(body, 3)


def then_destroyed():
    function = torch.utils.checkpoint.CheckpointFunction
    before = function.forward
    ShardedTensor.from_local(torch.ones(2, 3), 1)
    changed = function.forward
    ts.distributed.destroy_process_group()
    return before is not changed, function.forward is before


def test_torchs_checkpoint_is_left_as_it_was():
    """`destroy_process_group` takes the change back."""
    assert run_ranks(then_destroyed, 2) == [(True, True)] * 2
