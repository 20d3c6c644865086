"""Finished layers and the dense forwards on marked parameters give the same numbers.

The finished ones move and sum by their declaration, the marked ones by the rules of torch's
operations: two accounts of one thing.
"""

import copy

import pytest
import torch
import torchshard as ts
from torchshard.testing import run_ranks

from layer_zoo import (
    ParallelConv1d,
    ParallelConv2d,
    ParallelEmbedding,
    ParallelLinear,
)

FLOATS = torch.float64
BOTH = {"weight": 0, "bias": 0}


def floats(*shape):
    return lambda: torch.randn(shape, dtype=FLOATS)


def ids(*shape):
    return lambda: torch.randint(7, shape)


CASES = {
    "linear, columns": (ParallelLinear, (5, 7), {"dim": 1}, BOTH, floats(4, 5)),
    "linear, rows": (ParallelLinear, (7, 5), {"dim": 0}, {"weight": 1}, floats(4, 7)),
    "linear, no bias": (
        ParallelLinear,
        (7, 5, False),
        {"dim": 0},
        {"weight": 1},
        floats(2, 3, 7),
    ),
    "embedding, rows": (
        ParallelEmbedding,
        (7, 5),
        {"dim": 0},
        {"weight": 0},
        ids(4, 3),
    ),
    "embedding, columns": (
        ParallelEmbedding,
        (7, 5),
        {"dim": 1},
        {"weight": 1},
        ids(4, 3),
    ),
    "embedding, padding": (
        ParallelEmbedding,
        (7, 5, 2),
        {"dim": 0},
        {"weight": 0},
        ids(9),
    ),
    "conv2d, columns": (
        ParallelConv2d,
        (3, 5, (2, 3), 1, (1, 2)),
        {"dim": 1},
        BOTH,
        floats(2, 3, 6, 5),
    ),
    "conv1d, rows": (
        ParallelConv1d,
        (5, 3, 3, 2),
        {"dim": 0},
        {"weight": 1},
        floats(2, 5, 8),
    ),
    "conv2d, depthwise": (
        ParallelConv2d,
        (7, 7, 3, 1, 1, 1, 7),
        {"dim": 1},
        BOTH,
        floats(2, 7, 4, 4),
    ),
}


def marked(dense, divided):
    """Return a layer with the dense class's own forward on divided parameters."""
    methods = {
        name: method for name, method in vars(type(dense)).items() if "forward" in name
    }
    methods["dense_forward"] = methods.pop("forward")
    layer = type("Marked", (ts.MarkedLayer,), methods)()
    layer.take_over(dense, divided)
    return layer


def results(layer, x):
    """Return the output and the gradients of input and parameters, whole."""
    x = x.clone().requires_grad_(x.is_floating_point())
    y = ts.tensor.whole(layer(x))
    weights = torch.linspace(-1, 1, y.numel(), dtype=FLOATS).reshape(y.shape)
    (y.square() * weights).sum().backward()
    grads = {
        key: parameter.grad
        if layer.ranges_of(key) is None
        else ts.state.gathered(parameter.grad, layer, key)
        for key, parameter in layer.named_parameters()
    }
    return {"output": y.detach(), "input": x.grad, **grads}


def gives_the_same(name):
    finished_class, arguments, options, divided, draw = CASES[name]
    torch.manual_seed(3)
    dense = finished_class.dense_class(*arguments).to(FLOATS)
    x = draw()
    finished = finished_class(*arguments, **options).to(FLOATS)
    finished.load_state_dict(dense.state_dict())
    other = marked(copy.deepcopy(dense), divided)
    assert other.ranges_of("weight") is not None
    torch.testing.assert_close(results(other, x), results(finished, x))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_marked_and_finished_layers_give_the_same_numbers(world_size):
    """Output, the input's gradient and the parameters', as the finished layer has them."""
    run_ranks(gives_all_the_same, world_size)


def gives_all_the_same():
    for name in CASES:
        gives_the_same(name)
