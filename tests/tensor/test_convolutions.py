"""Convolutions of divided operands: as of whole tensors, or an error before any collective."""

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_compiled, expect_rules
from sharded_cases import marked
from torchshard.errors import ShardedOpError
from torchshard.layout import ranges_of_lengths
from torchshard.tensor import ShardedTensor
from torchshard.testing.ranks import run_ranks

_ = None
OUT, SUM, BATCH = (_, 0, 0), (1, 1, _), (0, _, _)


def of(function, **options):
    return lambda *operands: function(*operands, **options)


CONVOLUTIONS = {
    "conv1d": (
        of(F.conv1d, padding="same", dilation=2),
        [(4, 5, 6), (7, 5, 3), (7,)],
        {OUT, SUM, BATCH, (_, 0, _), (_, _, 0), (1, _, _), (_, 1, _)},
    ),
    "conv1d of torch, without batch": (
        torch.conv1d,
        [(5, 6), (4, 5, 3), (4,)],
        {OUT, (0, 1, _)},
    ),
    "conv2d": (
        of(F.conv2d, stride=(2, 1), padding=1),
        [(4, 4, 5, 3), (5, 4, 3, 2), (5,)],
        {OUT, SUM, BATCH},
    ),
    "conv2d without bias": (
        F.conv2d,
        [(2, 4, 3, 3), (5, 4, 3, 2)],
        {(_, 0), (1, 1), (1, _), (_, 1)},
    ),
    "conv2d of groups": (
        lambda x, weight, bias: F.conv2d(x, weight, bias, 1, 1, 1, 4),
        [(2, 8, 4, 3), (12, 2, 3, 2), (12,)],
        {(1, 0, 0), (_, 0, 0), (1, _, _), (1, 0, _), (_, _, 0)},
        {(0, 1): 2, (1, 0): 3, (2, 0): 3},
    ),
    "depthwise conv2d": (
        of(F.conv2d, groups=5),
        [(2, 5, 4, 3), (5, 1, 3, 2), (5,)],
        {(1, 0, 0), (_, 0, 0), (1, _, _)},
    ),
    "conv3d": (
        of(F.conv3d, padding=(1, 0, 1)),
        [(4, 4, 3, 2, 3), (5, 4, 2, 2, 3), (5,)],
        {OUT, SUM, BATCH},
    ),
    "conv_transpose1d": (
        of(F.conv_transpose1d, stride=2, output_padding=1),
        [(4, 5, 4), (5, 4, 3), (4,)],
        {(_, 1, 0), (1, 0, _), BATCH, (_, _, 0)},
    ),
    "conv_transpose2d of groups": (
        lambda x, weight, bias: F.conv_transpose2d(x, weight, bias, 2, 1, 1, 4, 2),
        [(2, 8, 3, 3), (8, 3, 3, 2), (12,)],
        {(1, 0, 0), (_, 0, 0), (1, _, _), (_, _, 0)},
        {(0, 1): 2, (1, 0): 2, (2, 0): 3},
    ),
    "conv_transpose3d, without batch": (
        F.conv_transpose3d,
        [(4, 2, 2, 2), (4, 5, 1, 2, 2), (5,)],
        {(_, 1, 0), (0, 0, _)},
    ),
}


def convolutions_hold():
    expect_rules(CONVOLUTIONS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_convolutions_of_divided_operands(world_size):
    """Divided along channels, groups and the batch they are right, uneven sizes included."""
    run_ranks(convolutions_hold, world_size)


def compiles():
    expect_compiled(CONVOLUTIONS, "conv2d", OUT)
    expect_compiled(CONVOLUTIONS, "conv2d", SUM)
    expect_compiled(CONVOLUTIONS, "conv_transpose2d of groups", (1, 0, 0))


def test_compiled_as_one_graph():
    """Output and gradients are those of whole tensors."""
    run_ranks(compiles, 2)


def says_why_it_cannot():
    x, weight = torch.ones(2, 4, 6, 6), torch.ones(6, 2, 3, 3)
    positions = ShardedTensor.from_local(x, 2)
    with pytest.raises(ShardedOpError, match="needs positions that neighbouring ranks"):
        F.conv2d(positions, torch.ones(4, 4, 3, 3))
    cut = marked(weight, 0, ranges_of_lengths([4, 2]))
    with pytest.raises(
        ShardedOpError, match="needs the 3 indices of each group on one"
    ):
        F.conv2d(x, cut, groups=2)
    empty = marked(torch.ones(4, 4, 3, 3), 0, ranges_of_lengths([4, 0]))
    with pytest.raises(ShardedOpError, match="no empty part: 4 of 'out' for 2 ranks"):
        F.conv2d(x, empty)
    within = ShardedTensor.from_local(weight, 1)
    with pytest.raises(ShardedOpError, match="divide dim 0 of its weight"):
        F.conv2d(x, within, groups=2)


def test_what_is_refused_says_why():
    """Divided positions, cut groups, channels for some ranks only."""
    run_ranks(says_why_it_cannot, 2)
