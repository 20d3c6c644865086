"""TORCHSHARD_DEBUG=1: what differs between ranks is an error on all of them."""

import pytest
import torch
import torch.nn.functional as F
from sharded_cases import marked
from torch.distributed.tensor.debug import CommDebugMode
from torchshard.distributed import collectives, groups, ops
from torchshard.errors import GroupError
from torchshard.layout import balanced_ranges
from torchshard.testing.ranks import run_ranks


def debugging(body):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSHARD_DEBUG", "1")
        return body()


def message_of(call):
    with pytest.raises(GroupError) as error:
        call()
    return str(error.value)


def mismatches():
    group = groups.model_group()
    rank, size = group.rank, group.size
    x = torch.ones(3, 4)
    own = torch.full((2,), float(rank == 2))
    bias = own[:1].clone().requires_grad_()

    def another_branch():
        if rank == 1:
            return ops.reduce(x)
        return ops.reduce_scatter(x, 0)

    return [
        message_of(lambda: ops.reduce(torch.ones(2 + (rank == 1)))),
        message_of(lambda: ops.reduce(x.double() if rank == 0 else x)),
        message_of(another_branch),
        message_of(lambda: ops.copy(own)),
        message_of(lambda: ops.scatter(own, 0)),
        message_of(lambda: marked(x, 1, balanced_ranges(4, size)) * bias),
    ]


def mismatches_found():
    return debugging(mismatches)


def test_differing_calls_and_inputs_are_named_on_every_rank():
    """T30: shapes, dtypes, the order of collectives and the values of whole tensors."""
    results = run_ranks(mismatches_found, 3, timeout_s=30)
    assert results[0] == results[1] == results[2]
    advice = (
        ". Expected the same on all: give all ranks the same model and inputs of one shape and"
        " dtype, and let all take the same branches."
    )
    differ = (
        " is taken for a whole tensor, the same on every rank, but on rank 2 it differs from"
        " rank 0's: rank 2 has 1.0 at [0], rank 0 0.0. Give the ranks of a model group the same"
        " batch, and seed them alike."
    )
    reduce = "all_reduce (sum) of"
    assert results[0] == [
        f"The ranks' next collectives differ: rank 0: {reduce} (2,), torch.float32; rank 1:"
        f" {reduce} (3,), torch.float32; rank 2: {reduce} (2,), torch.float32{advice}",
        f"The ranks' next collectives differ: rank 0: {reduce} (3, 4), torch.float64; rank"
        f" 1: {reduce} (3, 4), torch.float32; rank 2: {reduce} (3, 4),"
        f" torch.float32{advice}",
        "The ranks' next collectives differ: rank 0: reduce_scatter of (3, 1, 4),"
        f" torch.float32; rank 1: {reduce} (3, 4), torch.float32; rank 2: reduce_scatter of"
        f" (3, 1, 4), torch.float32{advice}",
        f"x of copy{differ}",
        f"x of scatter{differ}",
        f"other of mul{differ}",
    ]


def agreements():
    size = groups.get_world_size()
    x = torch.randn(
        3, 5, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    with_nan = torch.tensor([float("nan"), 1.0])
    ops.copy(with_nan)
    y = marked(x, 1, balanced_ranges(5, size))
    loss = F.cross_entropy(y * 2 + x.sum(1, keepdim=True), torch.tensor([0, 4, 2]))
    (loss + y.softmax(1).amax() + ops.all_to_all(x, 0, 1).sum()).backward()
    collectives.broadcast(x, groups.model_group(), 1)
    return x.grad


def agreements_pass():
    return debugging(agreements), agreements()


def test_what_agrees_passes():
    """Uneven shards and nans are no mismatch, and results are those without the checks."""
    for checked, plain in run_ranks(agreements_pass, 3):
        assert torch.equal(checked, plain)


def counted():
    with CommDebugMode() as count:
        ops.reduce(torch.ones(2))
        ops.copy(torch.ones(2))
    return count.get_total_counts()


def test_without_the_variable_nothing_is_checked():
    """No collective of its own."""
    assert run_ranks(counted, 2) == [1, 1]
