"""What torch runs shards through unasked: functions of one's own, torch.func, forward mode."""

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torchshard.errors import ShardedOpError
from torchshard.testing.ranks import run_ranks


class Softmax(torch.autograd.Function):
    """Right of whole tensors; of shards its sum is one of a rank's part."""

    @staticmethod
    def forward(ctx, x):
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


class Square(torch.autograd.Function):
    """The newer form, with `setup_context`."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Recomputed(torch.autograd.Function):
    """Runs layers on a plain tensor, and again in backward, as reversible blocks do."""

    @staticmethod
    def forward(ctx, x, run):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.run(x).backward(grad)
        return x.grad, None


def twins():
    dense = nn.Linear(4, 6).double()
    layer = ts.nn.ParallelLinear(4, 6, dim=1).double()
    layer.load_state_dict(dense.state_dict())
    return dense, layer


def inputs():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, 4, dtype=torch.float64, generator=generator)


def tangent_of(layer):
    with forward_ad.dual_level():
        return layer(forward_ad.make_dual(inputs(), inputs()))


def batched_backward(layer):
    x = inputs().requires_grad_()
    rows = torch.eye(5, dtype=torch.float64)
    y = layer(x).square().sum(-1)
    torch.autograd.grad(y, x, rows, is_grads_batched=True)


REFUSED = {
    "function": lambda layer: Softmax.apply(layer(inputs())),
    "function of a parameter": lambda layer: Softmax.apply(layer.weight),
    "newer function": lambda layer: Square.apply(layer(inputs())),
    "vmap of a shard": lambda layer: vmap(torch.sum)(layer(inputs())),
    "vmap along it": lambda layer: vmap(torch.sum, in_dims=1)(layer(inputs())),
    "vmap of a parameter": lambda layer: vmap(torch.sum)(layer.weight),
    "vmap around a shard": lambda layer: vmap(layer(inputs()).mul)(torch.ones(3)),
    "vmap of a layer": lambda layer: vmap(layer)(inputs()),
    "grad of a shard": lambda layer: grad(torch.sum)(layer(inputs())),
    "grad of a parameter": lambda layer: grad(torch.sum)(layer.weight),
    "grad through a layer": lambda layer: grad(lambda x: layer(x).sum())(inputs()),
    "vjp": lambda layer: vjp(lambda x: layer(x).sum(), inputs()),
    "jvp": lambda layer: jvp(layer, (inputs(),), (inputs(),)),
    "jvp of a shard": lambda layer: jvp(torch.exp, (layer(inputs()),), (inputs(),)),
    "jacrev": lambda layer: jacrev(layer)(inputs()),
    "forward mode": tangent_of,
    "batched backward": batched_backward,
}


def refusals():
    found = {}
    for name, call in REFUSED.items():
        with pytest.raises(ShardedOpError) as error:
            call(twins()[1])
        found[name] = str(error.value)
    return found


def test_what_would_take_a_shard_for_the_whole_is_refused():
    """On every rank, with the way out; nothing hangs."""
    for found in run_ranks(refusals, 2):
        for name, text in found.items():
            way = "torchshard.distributed.gather(x)"
            assert way in text, name
            what = "torch.autograd.Function" if "function" in name else "torch.func"
            assert what in text, name


def right_ones():
    dense, layer = twins()
    cotangent = torch.randn(
        5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    runs = [
        lambda model: Softmax.apply(ts.distributed.gather(model, dim=-1)),
        lambda model: F.softmax(model, -1),
    ]
    for run in runs:
        x, y = inputs().requires_grad_(), inputs().requires_grad_()
        want = torch.softmax(dense(x), -1)
        got = run(layer(y))
        got = got.gather() if isinstance(got, ts.ShardedTensor) else got
        (got * cotangent).sum().backward()
        (want * cotangent).sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(y.grad, x.grad)
    x, y = inputs().requires_grad_(), inputs().requires_grad_()
    Recomputed.apply(y, lambda v: layer(v).exp().sum(-1)).sum().backward()
    dense(x).exp().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    with (
        torch.no_grad()
    ):  # nothing is differentiated: the rules give the whole's values
        torch.testing.assert_close(
            Softmax.apply(layer(inputs())).gather(), dense(inputs()).softmax(-1)
        )
    parameters = dict(layer.named_parameters())
    y = functional_call(layer, parameters, (inputs(),))
    torch.testing.assert_close(y.gather(), dense(inputs()))
    jacobian = torch.autograd.functional.jacobian
    rows = inputs()[0]
    torch.testing.assert_close(
        jacobian(lambda v: layer(v).softmax(-1).square().sum(), rows),
        jacobian(lambda v: dense(v).softmax(-1).square().sum(), rows),
    )


def test_functions_beside_shards_are_right():
    """On whole tensors, without gradients, around layers; and torch.autograd.functional."""
    run_ranks(right_ones, 2)
