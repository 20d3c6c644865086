"""Faults that users of other libraries reported, for what no other file names: T21 and on."""

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torchshard.errors import RankError
from torchshard.testing import run_ranks


def row_input_gradients() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(7, 5).double()
    layer = ts.nn.ParallelLinear(7, 5, dim=0).double()
    layer.load_state_dict(dense.state_dict())
    cotangent = torch.randn(3, 5, dtype=torch.float64)
    ranges = ts.ranges_of("in", {"in": ts.Axis(7)}, ts.distributed.get_world_size())
    x = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(dense(x), x, cotangent)
    shard = ts.distributed.scatter(x, -1, ranges=ranges)
    marked = ts.ShardedTensor.from_local(shard, -1, ranges=ranges)
    transposed = x.t().contiguous().t()
    for given in (x, marked, transposed):
        (grad,) = torch.autograd.grad(layer(given), x, cotangent)
        torch.testing.assert_close(grad, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("world_size", [2, 3])
def test_t21_row_layers_give_input_gradients_in_every_mode(world_size: int) -> None:
    """Given whole, as a shard or strided, the input's gradient is the dense layer's."""
    run_ranks(row_input_gradients, world_size)


def collect_on_rank_0_only() -> None:
    model = ts.nn.ParallelLinear(4, 5, dim=1)
    if ts.distributed.get_rank() == 0:
        ts.collect_state_dict(model)


def test_t44_collecting_on_one_rank_ends_with_an_error() -> None:
    """A collective call made by one rank alone fails within the timeout, and is named."""
    with pytest.raises(RankError, match=r"^collect_on_rank_0_only: rank 0 of 2"):
        run_ranks(collect_on_rank_0_only, 2, timeout_s=15)


def depthwise_then_group_norm() -> None:
    torch.manual_seed(0)
    dense = nn.Conv2d(6, 6, 3, groups=6).double()
    layer = ts.nn.ParallelConv2d(6, 6, 3, groups=6, dim=1).double()
    layer.load_state_dict(dense.state_dict())
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    y = layer(x)
    torch.testing.assert_close(ts.distributed.gather(y), dense(x), rtol=0, atol=1e-12)
    if layer.group.size == 3:  # whole groups of the norm: local
        normalised = ts.distributed.gather(F.group_norm(y, 3))
        expected = F.group_norm(dense(x), 3)
        torch.testing.assert_close(normalised, expected, rtol=0, atol=1e-12)
    else:
        with pytest.raises(ts.errors.ShardedOpError, match="group_norm"):
            F.group_norm(y, 3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_t71_depthwise_convolutions_are_sharded_by_group(world_size: int) -> None:
    """Depthwise channels are divided; a norm over them is local for whole groups, or raises."""
    run_ranks(depthwise_then_group_norm, world_size)


def masks_after_restoring_the_stream() -> None:
    torch.manual_seed(0)
    y = ts.nn.ParallelLinear(4, 64, dim=1)(torch.ones(2, 4))
    saved = torch.get_rng_state()
    first = F.dropout(y).to_local()
    torch.set_rng_state(saved)
    assert torch.equal(F.dropout(y).to_local(), first)
    assert not torch.equal(F.dropout(y).to_local(), first)


def test_t42_saving_the_random_stream_restores_shard_masks() -> None:
    """The default stream's state is all there is to save: shards' masks follow from it."""
    run_ranks(masks_after_restoring_the_stream, 2)
