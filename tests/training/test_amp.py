"""The gradient scaler skips a step on all ranks or on none, and trains as torch's does."""

import math

import pytest
import torch
import torchshard as ts
from torch import nn
from torchshard.state import gathered
from torchshard.testing import run_ranks

FEATURES, CLASSES = 3, 5
OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": fused})
    for fused in (False, True)
] + [(torch.optim.AdamW, {"lr": 0.01, "fused": fused}) for fused in (False, True)]


def dense_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, FEATURES), nn.Tanh(), nn.Linear(FEATURES, CLASSES)
    )


def sharded_model(dim):
    model = dense_model()
    model[2] = ts.nn.ParallelLinear.convert_parallel_linear(model[2], dim=dim)
    return model.double()


def loss_of(model, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    target = torch.randint(CLASSES, (6,), generator=generator)
    return nn.functional.cross_entropy(model(x), target)


def parameters_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def whole_parameters(model):
    return [
        gathered(parameter.detach(), module, name)
        if isinstance(module, ts.ParallelLayer)
        else parameter.detach()
        for module in model
        for name, parameter in module.named_parameters()
    ]


def everywhere(value):
    return ts.distributed.gather(torch.tensor([value]), dim=0).tolist()


def overflow_skips(optimizer_class, defaults, dim, culprit):
    """Overflow on one rank's shard, in the second of three steps."""
    model, dense = sharded_model(dim), dense_model().double()
    scaler = ts.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    dense_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = optimizer_class(model.parameters(), **defaults)
    dense_optimizer = optimizer_class(dense.parameters(), **defaults)
    for step in range(3):
        scaler.scale(loss_of(model, step)).backward()
        dense_scaler.scale(loss_of(dense, step)).backward()
        before = parameters_of(model)
        if step == 1:
            dense[2].weight.grad[0, 0] = math.inf
            if ts.distributed.get_rank() == culprit:
                model[2].weight.grad.view(-1)[0] = math.inf
        for each, of in ((scaler, optimizer), (dense_scaler, dense_optimizer)):
            each.step(of)
            each.update()
            of.zero_grad()
        is_same = all(map(torch.equal, before, parameters_of(model)))
        assert everywhere(is_same) == [step == 1] * ts.distributed.get_world_size()
        assert set(everywhere(scaler.get_scale())) == {dense_scaler.get_scale()}
    for found, expected in zip(
        whole_parameters(model), dense.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)


def every_overflow():
    for optimizer_class, defaults in OPTIMIZERS:
        for dim in (1, 0):
            for culprit in {0, ts.distributed.get_world_size() - 1}:
                overflow_skips(optimizer_class, defaults, dim, culprit)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_r26_t63_overflow_on_one_shard_skips_the_step_everywhere(world_size):
    """R26, T63: fused or not, all ranks skip, scales stay equal, and training is dense."""
    run_ranks(every_overflow, world_size)


def unscale_and_clip():
    model, dense = sharded_model(1), dense_model().double()
    pairs = [
        (
            model,
            ts.amp.GradScaler("cpu", init_scale=2.0**10),
            ts.nn.utils.clip_grad_norm_,
        ),
        (
            dense,
            torch.amp.GradScaler("cpu", init_scale=2.0**10),
            torch.nn.utils.clip_grad_norm_,
        ),
    ]
    norms = []
    for each, scaler, clip in pairs:
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        for step in range(2):
            scaler.scale(loss_of(each, step)).backward()
            scaler.unscale_(optimizer)
            norms.append(clip(each.parameters(), 0.05))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    torch.testing.assert_close(norms[:2], norms[2:], rtol=0, atol=1e-10)
    for found, expected in zip(
        whole_parameters(model), dense.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_r25_unscale_then_clip(world_size):
    """R25: clipped at the norm of the unscaled gradients, as torch does to the dense model."""
    run_ranks(unscale_and_clip, world_size)


def with_zero():
    model, dense = sharded_model(1), dense_model().double()
    optimizer = ts.optim.ZeroRedundancyOptimizer(model, torch.optim.AdamW, lr=0.01)
    plain = torch.optim.AdamW(dense.parameters(), lr=0.01)
    scaler, dense_scaler = ts.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for step in range(3):
        for each, scale, of in (
            (model, scaler, optimizer),
            (dense, dense_scaler, plain),
        ):
            scale.scale(loss_of(each, step)).backward()
            if step == 1 and (each is dense or ts.distributed.get_rank() == 1):
                each[2].bias.grad[0] = math.nan
            scale.step(of)
            scale.update()
            of.zero_grad()
    assert scaler.get_scale() == dense_scaler.get_scale() == 2.0**15
    for found, expected in zip(
        whole_parameters(model), dense.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-10)


def test_t63_with_the_optimizer_that_divides_its_state():
    """T63: ZeroRedundancyOptimizer's step is skipped everywhere too."""
    run_ranks(with_zero, 2)


def disabled():
    model = sharded_model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ts.amp.GradScaler("cpu", enabled=False)
    before = parameters_of(model)
    scaler.scale(loss_of(model, 0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not any(map(torch.equal, before, parameters_of(model)))
    assert scaler.get_scale() == 1.0


def test_disabled():
    """A scaler that is switched off steps as if it were not there."""
    run_ranks(disabled, 2)
