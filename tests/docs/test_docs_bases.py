"""The layers that extend a narrower base in making_a_layer.md equal dense torch on several ranks."""

import doctest
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchshard.testing import Case, Floats, check_layer, run_ranks

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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_layers_of_the_page_equal_dense_torch(world_size):
    """Output, gradients, a step, state, at uneven sizes."""
    run_ranks(equal_dense, world_size)
