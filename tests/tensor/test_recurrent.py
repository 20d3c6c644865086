"""Recurrent networks and cells on a divided batch: as on the whole, or an error."""

import pytest
import torch
from operand_cases import expect_rules
from sharded_cases import marked, randoms
from torch import nn
from torchshard.errors import ShardedOpError
from torchshard.layout import balanced_ranges
from torchshard.tensor import whole
from torchshard.testing.ranks import run_ranks

_ = None
KINDS = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}


def seeded(module, *args, **kwargs):
    torch.manual_seed(0)
    return module(*args, **kwargs).double()


def steps(module):
    def call(x, h, *c):
        result, last = module(x, (h, *c) if c else h)
        return [result, *(last if c else [last])]

    return call


def cases():
    for name, kind in KINDS.items():
        states = 2 if name == "LSTM" else 1
        for options in ({}, {"batch_first": True}, {"bidirectional": True}):
            module = seeded(kind, 3, 2, num_layers=2, **options)
            shape, batch = ((4, 3), 0) if "batch_first" in options else ((4, 3), 1)
            shape = (4, 5, 3) if batch == 0 else (5, 4, 3)
            state = (4 if "bidirectional" in options else 2, 4, 2)
            needed = {(batch, *[1] * states), (batch, *[_] * states)}
            operands = [shape, *[state] * states]
            yield f"{name} {options}", (steps(module), operands, needed)
    for kind in (nn.RNNCell, nn.GRUCell):
        yield kind.__name__, (seeded(kind, 3, 2), [(4, 3), (4, 2)], {(0, 0), (_, 0)})
    cell = seeded(nn.LSTMCell, 3, 2)

    def step(x, h, c):
        return list(cell(x, (h, c)))

    yield "LSTMCell", (step, [(4, 3), (4, 2), (4, 2)], {(0, 0, 0), (0, _, _)})


def networks_hold():
    expect_rules(dict(cases()))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_recurrent_networks_of_a_divided_batch(world_size):
    """Output, last states and gradients; time and features are refused, never wrong."""
    run_ranks(networks_hold, world_size)


def parameters_learn():
    module, dense = seeded(nn.LSTM, 3, 2), seeded(nn.LSTM, 3, 2)
    x, cot = randoms((5, 4, 3), 1), randoms((5, 4, 2), 2)
    (whole(module(marked(x, 1, balanced_ranges(4, 3)))[0]) * cot).sum().backward()
    (dense(x)[0] * cot).sum().backward()
    for mine, want in zip(module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad)


def test_whole_weights_get_the_gradient_of_the_whole_batch():
    """Summed over the ranks."""
    run_ranks(parameters_learn, 3)


def refusals():
    x = marked(randoms((5, 4, 3), 1), 1, balanced_ranges(4, 2))
    noisy = seeded(nn.GRU, 3, 2, num_layers=2, dropout=0.5)
    with pytest.raises(ShardedOpError, match="dropout between its layers"):
        noisy(x)
    alone = marked(randoms((5, 1, 3), 1), 1, balanced_ranges(1, 2))
    with pytest.raises(ShardedOpError, match="takes no empty part"):
        seeded(nn.GRU, 3, 2)(alone)


def test_what_is_refused_says_why():
    """Dropout between layers, and a rank without a sequence."""
    run_ranks(refusals, 2)
