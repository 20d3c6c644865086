"""The layers that extend a narrower base in making_a_layer.md equal dense torch on several ranks."""

import doctest
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchshard.testing import Case, Floats, Integers, check_layer, run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "making_a_layer.md"


def layers_of_the_page():
    """Return a module with what the examples of the page define; it pickles."""
    page = sys.modules["layers_of_the_page"] = types.ModuleType("layers_of_the_page")
    for example in doctest.DocTestParser().get_examples(PAGE.read_text("utf-8")):
        if example.source.startswith(("class", "import")):
            exec(example.source, page.__dict__)
    return page


class Upsample(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        dense = nn.ConvTranspose1d(in_channels, out_channels, 2, stride=2)
        self.weight, self.bias = dense.weight, dense.bias

    def forward(self, input):
        return F.conv_transpose1d(input, self.weight, self.bias, stride=2)


class MLP(nn.Module):
    def __init__(self, size, hidden):
        super().__init__()
        self.up = nn.Parameter(nn.Linear(size, hidden, bias=False).weight.detach())
        self.down = nn.Parameter(torch.empty(size, hidden))
        with torch.no_grad():
            self.down.uniform_(-(size**-0.5), size**-0.5)

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class ParabolaHead(nn.Module):
    def __init__(self, in_features, num_classes, scale=16.0, bend=0.5):
        super().__init__()
        self.scale, self.bend = scale, bend
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        nn.init.normal_(self.weight, 0.0, in_features**-0.5)

    def forward(self, x, target):
        cosines = F.linear(F.normalize(x), F.normalize(self.weight))
        moved = 1 - self.bend * (cosines.acos() + 0.3) ** 2
        chosen = F.one_hot(target, cosines.shape[1]).bool()
        return F.cross_entropy(self.scale * torch.where(chosen, moved, cosines), target)


class FocalLoss(nn.Module):
    """By the formula: -w (1 - p)^gamma log p, a mean by the targets' weights."""

    def __init__(self, gamma=2.0, weight=None, ignore_index=-100, reduction="mean"):
        super().__init__()
        self.gamma, self.ignore_index, self.reduction = gamma, ignore_index, reduction
        self.register_buffer("weight", weight)

    def forward(self, input, target):
        live = target != self.ignore_index
        columns = torch.where(live, target, 0)
        log_p = F.log_softmax(input, 1).gather(1, columns.unsqueeze(1)).squeeze(1)
        weights = live.to(input.dtype)
        if self.weight is not None:
            weights = weights * self.weight[columns]
        rows = -weights * (1 - log_p.exp()) ** self.gamma * log_p
        if self.reduction == "none":
            return rows
        total = rows.sum()
        return total if self.reduction == "sum" else total / weights.sum()


def equal_dense():
    page = layers_of_the_page()
    upsample = {"layer": page.ParallelUpsample, "dense": Upsample}
    x = [Floats((2, 6, 3))]
    check_layer(
        Case(**upsample, args=(6, 12), sharding={"dim": 1, "unit": 3}, inputs=x)
    )
    check_layer(Case(**upsample, args=(6, 5), sharding={"dim": 0}, inputs=x))
    mlp = {"layer": page.ParallelMLP, "dense": MLP}
    check_layer(Case(**mlp, args=(3, 7), inputs=[Floats((4, 3))]))


def heads_and_losses_equal_dense():
    page = layers_of_the_page()
    head = {"layer": page.ParallelParabolaHead, "dense": ParabolaHead}
    x, target = [Floats((6, 5)), Integers(7, (6,))], Integers(7, (2, 3))
    for dim in (1, 0, None):
        options = {"scale": 4.0, "bend": 0.3}
        case = Case(
            **head, args=(5, 7), options=options, sharding={"dim": dim}, inputs=x
        )
        check_layer(case)
        if dim == 1:
            check_layer(case, compiled=True)
    focal = {"layer": page.ParallelFocalLoss, "dense": FocalLoss}
    logits = [Floats((6, 7), shard=1), Integers(7, (6,))]
    check_layer(Case(**focal, inputs=logits, collectives=(1, 0)))
    weighted = {"gamma": 1.5, "weight": torch.linspace(0.5, 2, 7), "ignore_index": 2}
    check_layer(Case(**focal, options=weighted, inputs=logits))
    every = {**weighted, "gamma": 3.0, "reduction": "none"}
    check_layer(
        Case(**focal, options=every, inputs=[Floats((2, 7, 3), shard=1), target])
    )
    check_layer(Case(**focal, options={"reduction": "sum"}, inputs=logits))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_head_and_the_loss_of_the_page_equal_their_formulas(world_size):
    """All splits of the head, with a derived slope; weights and ignored rows of the loss."""
    run_ranks(heads_and_losses_equal_dense, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_layers_of_the_page_equal_dense_torch(world_size):
    """Output, gradients, a step, state, at uneven sizes."""
    run_ranks(equal_dense, world_size)
