"""Norms of divided operands: as of whole tensors, or an error before any collective."""

import pytest
import torch
import torch.nn.functional as F
from operand_cases import expect_compiled, expect_rules
from sharded_cases import marked, randoms
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.layout import balanced_ranges, ranges_of_lengths
from torchshard.tensor import ShardedTensor
from torchshard.testing.ranks import run_ranks

_ = None


def layer_norm(x, weight=None, bias=None, shape=(5,)):
    return F.layer_norm(x, shape, weight, bias)


def running(norm, **options):
    """Return the output of a norm, and the running moments that it leaves."""

    def function(x, mean, var, *affine):
        mean, var = mean.clone(), var.clone()
        y = norm(x, mean, var, *affine, **options)
        return y, mean, var

    return function


def of(function, *values, **options):
    return lambda x, *operands: function(x, *values, *operands, **options)


def group_norm(num_groups):
    return lambda x, *affine: F.group_norm(x, num_groups, *affine)


MEAN, VAR = randoms((5,), 11), randoms((5,), 12).square()
LAST = {(2, 0, 0), (2, _, _), (_, 0, 0), (_, _, 0), (_, 0, _), (2, 0, _)}
CHANNELS = (1, 0, 0, 0, 0)
LAYER_NORMS = {
    "layer_norm": (layer_norm, [(2, 3, 5), (5,), (5,)], {*LAST, (0, _, _), (1, _, _)}),
    "layer_norm alone": (layer_norm, [(4, 5)], {(0,), (1,)}),
    "layer_norm of two dims": (
        of(torch.layer_norm, (4, 5)),
        [(3, 4, 5), (4, 5), (4, 5)],
        {(1, 0, 0), (2, 1, 1), (_, 0, _), (0, _, _)},
    ),
    "rms_norm": (
        of(F.rms_norm, (5,)),
        [(2, 3, 5), (5,)],
        {(2, 0), (2, _), (_, 0), (0, _), (1, _)},
    ),
    "rms_norm with eps": (of(F.rms_norm, (4, 5), eps=0.1), [(4, 5)], {(0,), (1,)}),
}
BATCH_NORMS = {
    "training": (
        running(F.batch_norm, training=True, momentum=0.3),
        [(4, 5, 3), MEAN, VAR, (5,), (5,)],
        {CHANNELS, (1, _, _, _, _), (_, 0, 0, _, _), (_, _, _, 0, 0), (1, 0, 0, _, _)}
        | {(0, _, _, _, _), (2, _, _, _, _)},
    ),
    "evaluating": (
        running(F.batch_norm, training=False),
        [(4, 5, 3, 2), MEAN, VAR, (5,), (5,)],
        {CHANNELS, (1, _, _, _, _), (_, _, _, 0, 0), (0, _, _, _, _), (3, _, _, _, _)},
    ),
    "batch_norm of rows": (
        lambda x: F.batch_norm(x, None, None, training=True),
        [(5, 4)],
        {(0,), (1,)},
    ),
    "batch_norm of torch": (
        lambda x, weight, bias: torch.batch_norm(
            x, weight, bias, None, None, True, 0.1, 1e-3, False
        ),
        [(4, 5, 3), (5,), (5,)],
        {(1, 0, 0), (0, _, _), (_, 0, 0)},
    ),
    "instance_norm": (
        running(F.instance_norm, momentum=0.3),
        [(4, 5, 3), MEAN, VAR, (5,), (5,)],
        {CHANNELS, (1, _, _, _, _), (_, _, _, 0, 0)},
    ),
    "instance_norm alone": (F.instance_norm, [(4, 5, 3)], {(0,), (1,)}),
    "instance_norm by running moments": (
        running(F.instance_norm, use_input_stats=False),
        [(4, 5, 4), MEAN, VAR, (5,), (5,)],
        {CHANNELS, (0, _, _, _, _), (2, _, _, _, _)},
    ),
}
GROUP_NORMS = {
    "groups": (
        group_norm(4),
        [(4, 8, 3), (8,), (8,)],
        {(1, 0, 0), (_, 0, 0), (1, _, _), (0, _, _), (2, _, _)},
        {(0, 1): 2, (1, 0): 2, (2, 0): 2},
    ),
    "one group": (
        group_norm(1),
        [(4, 5, 3, 2), (5,), (5,)],
        {(1, 0, 0), (_, 0, 0), (1, _, _), (0, _, _), (3, _, _)},
    ),
    "groups of one": (group_norm(3), [(2, 3, 2), (3,), (3,)], {(1, 0, 0), (_, 0, _)}),
    "groups without weight": (of(torch.group_norm, 1), [(3, 5)], {(0,), (1,)}),
}


def layer_norms_hold():
    expect_rules(LAYER_NORMS)


def channel_norms_hold():
    expect_rules(BATCH_NORMS)
    expect_rules(GROUP_NORMS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layer_and_rms_norm_of_divided_operands(world_size):
    """Divided where they are normalised and elsewhere; ranks without an index too."""
    run_ranks(layer_norms_hold, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_norms_of_divided_channels(world_size):
    """Batch, instance and group norm: outputs, gradients and running moments."""
    run_ranks(channel_norms_hold, world_size)


def compiles():
    expect_compiled(LAYER_NORMS, "layer_norm", (2, 0, 0))
    expect_compiled(LAYER_NORMS, "rms_norm", (_, 0))
    expect_compiled(BATCH_NORMS, "batch_norm of torch", (0, _, _))
    expect_compiled(GROUP_NORMS, "groups", (1, 0, 0))


def test_compiled_as_one_graph():
    """Output and gradients are those of whole tensors."""
    run_ranks(compiles, 2)


def half_precision():
    x = (randoms((3, 64), 1) + 100).bfloat16()
    weight = randoms((64,), 2).bfloat16()
    for norm in (F.layer_norm, F.rms_norm):
        expected = norm(x, (64,), weight)
        shard = ShardedTensor.from_local(x.tensor_split(2, 1)[_rank()], 1)
        y = norm(shard, (64,), weight)
        assert y.dtype == torch.bfloat16
        own = expected.tensor_split(2, 1)[_rank()]
        torch.testing.assert_close(y.to_local(), own, rtol=0.01, atol=0.01)


def _rank():
    return torch.distributed.get_rank()


def test_half_precision_is_summed_in_single():
    """A mean far from 0 costs no digits; the result has the input's dtype."""
    run_ranks(half_precision, 2)


def says_why_it_cannot():
    x = randoms((2, 6, 4), 1)
    channels = marked(x, 1, balanced_ranges(6, 2))
    positions = ShardedTensor.from_local(x, 2)
    batch = ShardedTensor.from_local(x, 0)
    cut = marked(x, 1, ranges_of_lengths([4, 2]))
    some = marked(x, 1, ranges_of_lengths([6, 0]))
    moments = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    refused = {
        "instance_norm normalises over it": lambda: F.instance_norm(positions),
        "averages over it for the running": lambda: F.instance_norm(batch, *moments),
        "needs the 3 indices of each group": lambda: F.group_norm(cut, 2),
        "takes no empty part: 6 of 'channel'": lambda: F.batch_norm(
            some, *moments, training=True
        ),
    }
    for message, call in refused.items():
        with pytest.raises(ShardedOpError, match=message):
            call()
    with pytest.raises(ShapeError, match=r"does not end in normalized_shape=\[6, 2\]"):
        F.layer_norm(channels, (6, 2))
    with pytest.raises(ShapeError, match="Expected a batch and channels"):
        F.batch_norm(ShardedTensor.from_local(x[:, 0, 0], 0), *moments)
    lone = marked(x[:1, :, 0], 0, ranges_of_lengths([1, 0]))
    with pytest.raises(ShapeError, match="each channel needs more than 1 value"):
        F.batch_norm(lone, None, None, training=True)


def test_what_is_refused_says_why():
    """Cut groups, and moments that only some ranks would know."""
    run_ranks(says_why_it_cannot, 2)
