"""The flagship recipe: a DDP backbone and a sharded head train like one process.

Every rank has its own samples. The loss, the head's gradients and every gradient of the
backbone must be those of one process on all samples (R1 and R19 of what TorchShard 0.1.0 got
wrong: its backbone gradients were 1/R of the right ones).
"""

import copy

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchshard.state import gathered
from torchshard.testing import run_ranks

FEATURES, CLASSES = 6, 7
UNEVEN_BATCHES = [3, 1, 4, 2]


class Classifier(nn.Module):
    """A backbone whose layers are nested, and a head called `fc`."""

    def __init__(self, gather: bool) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()
        )
        self.squeeze = nn.Conv1d(4 * 5, FEATURES, 1)
        self.fc = nn.Linear(FEATURES, CLASSES)
        self.gather = gather

    def forward(self, x):
        x = self.squeeze(self.backbone(x).unsqueeze(-1)).squeeze(-1).relu()
        if self.gather:
            x = ts.distributed.gather(x, dim=0)
        return self.fc(x)


def samples(sizes):
    generator = torch.Generator().manual_seed(3)
    count = sum(sizes)
    x = torch.randn(count, 2, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def dense_step(model, sizes, group, reduction):
    """Return the loss of `group`'s samples in one process."""
    x, target = samples(sizes)
    parts, targets = x.split(sizes), target.split(sizes)
    logits = model(torch.cat([parts[r] for r in group]))
    pooled_target = torch.cat([targets[r] for r in group])
    return nn.CrossEntropyLoss(reduction=reduction)(logits, pooled_target)


def expect_gradients(wrapped, dense):
    for name, parameter in wrapped.named_parameters():
        layer = wrapped.get_submodule(name.rpartition(".")[0])
        grad = parameter.grad
        if isinstance(layer, ts.ParallelLayer):
            grad = gathered(grad, layer, name.rpartition(".")[2])
        expected = dense.get_parameter(name).grad
        worst = (grad - expected).abs().max().item()
        assert worst <= 1e-10, f"gradient of {name} differs by {worst}"


def recipe(dim, reduction, sizes, group_size, short):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    dense = Classifier(gather=False).double()
    model = copy.deepcopy(dense)
    model.gather = not short
    model = ts.nn.ParallelLinear.convert_parallel_linear(
        model, dim=dim, **({"gather_batch": True} if short else {})
    )
    ts.register_ddp_parameters_to_ignore(model)
    wrapped = DistributedDataParallel(model)
    criterion = ts.nn.ParallelCrossEntropyLoss(
        reduction=reduction, **({"gather_target": True} if short else {})
    )
    x, target = (part.split(sizes)[rank] for part in samples(sizes))
    if not short:
        target = ts.distributed.gather(target, dim=0)
    loss = criterion(wrapped(x), target)
    loss.backward()
    size = world if group_size == -1 else group_size
    groups = [range(first, first + size) for first in range(0, world, size)]
    losses = [dense_step(dense, sizes, group, reduction) for group in groups]
    # The data-parallel wrapper averages over the groups.
    (sum(losses) / len(losses)).backward()
    torch.testing.assert_close(loss, losses[rank // size], rtol=0, atol=1e-10)
    expect_gradients(model, dense)


def every_recipe(sizes, group_size=-1):
    for dim in (1, 0, None):
        for reduction in ("mean", "sum"):
            for short in (False, True):
                recipe(dim, reduction, sizes, group_size, short)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_r1_recipe_trains_like_one_process(world_size):
    """Loss, head and backbone gradients are those of one process on all samples."""
    run_ranks(every_recipe, world_size, [2] * world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_recipe_takes_batches_of_different_sizes(world_size):
    """A last batch that is smaller on some ranks changes nothing."""
    run_ranks(every_recipe, world_size, UNEVEN_BATCHES[:world_size])


def test_recipe_over_two_groups_of_two():
    """With 2 x 2 ranks, gradients are the mean over the two groups' losses."""
    run_ranks(every_recipe, 4, [2] * 4, 2, group_size=2)
