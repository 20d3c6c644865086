"""A shard's gradient over its replicas: the mean, of those too that did not use the layer."""

import pytest
import torch
import torch.distributed as dist
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchshard.testing.ranks import run_ranks


class Heads(nn.Module):
    """Heads over one stem, of which a forward uses those that it is told."""

    def __init__(self, recomputes=None):
        super().__init__()
        torch.manual_seed(1)
        self.stem = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 6) for _ in range(3))
        self.recomputes = recomputes

    def forward(self, x, uses):
        h = self.stem(x)
        losses = {"unused": h.sum() * 0}
        for index in uses:
            head = self.heads[index]
            if self.recomputes is None:
                y = head(h)
            else:
                y = checkpoint(head, h, use_reentrant=self.recomputes)
            losses[str(index)] = y.square().sum()
        return losses


def twins(recomputes=None):
    dense, model = Heads(recomputes).double(), Heads(recomputes).double()
    column = {"dim": 1, "gather_output": True}
    ts.parallelize(model, {"heads.*": column})
    ts.register_ddp_parameters_to_ignore(model)
    return dense, model


def compared(model, dense, case):
    for mine, theirs in zip(model.heads, dense.heads, strict=True):
        for name in ("weight", "bias"):
            grad, want = getattr(mine, name).grad, getattr(theirs, name).grad
            assert (grad is None) == (want is None), case
            if want is not None:
                close(ts.state.gathered(grad, mine, name), want, case)
    close(model.stem.weight.grad, dense.stem.weight.grad, case)


USES = {
    "each its own": [(0,), (1,)],
    "one leaves a head out": [(0, 1), (0,)],
    "one uses none": [(0, 1, 2), ()],
    "in another order": [(0, 1, 2), (2, 1, 0)],
    "one head nobody uses": [(0,), (0, 1)],
}


def used_differently(recomputes):
    replica = dist.get_rank() // 2
    xs = [randoms((3, 4), 10 + index) for index in range(2)]
    for case, uses in USES.items():
        dense, model = twins(recomputes)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        for _ in range(2):  # the second accumulates
            sum(wrapped(xs[replica], uses[replica]).values()).backward()
            for x, used in zip(xs, uses, strict=True):
                (sum(dense(x, used).values()) / 2).backward()
        compared(model, dense, case)


@pytest.mark.filterwarnings("ignore:find_unused_parameters:UserWarning")
@pytest.mark.parametrize("recomputes", [None, False, True])
def test_replicas_may_use_different_layers(recomputes):
    """As DistributedDataParallel does for what every rank holds, and no rank waits."""
    run_ranks(used_differently, 4, recomputes, group_size=2)


def accumulated():
    replica = dist.get_rank() // 2
    dense, model = twins()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    with wrapped.no_sync(), CommDebugMode() as quiet:
        sum(wrapped(randoms((3, 4), replica), (0,)).values()).backward()
    with CommDebugMode() as counted:
        sum(wrapped(randoms((3, 4), 5 + replica), (1,)).values()).backward()
    for index in range(2):
        (sum(dense(randoms((3, 4), index), (0,)).values()) / 2).backward()
        (sum(dense(randoms((3, 4), 5 + index), (1,)).values()) / 2).backward()
    compared(model, dense, "no_sync")
    return counted.get_total_counts() - quiet.get_total_counts()


def test_no_sync_exchanges_nothing():
    """The next backward brings the mean of all that has been accumulated, in two all-reduces of the shards and two of the stem."""
    assert run_ranks(accumulated, 4, group_size=2) == [4] * 4


def after_an_error():
    replica = dist.get_rank() // 2
    dense, model = twins()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    outputs = wrapped(randoms((3, 4), 1), (0,))

    def fail(grad):
        raise ValueError("on all ranks")

    outputs["0"].register_hook(fail)
    with pytest.raises(ValueError, match="on all ranks"):
        sum(outputs.values()).backward()
    model.zero_grad()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    sum(wrapped(randoms((3, 4), replica), (0,)).values()).backward()
    for index in range(2):
        (sum(dense(randoms((3, 4), index), (0,)).values()) / 2).backward()
    compared(model, dense, "after an error")


def test_a_backward_that_failed_leaves_nothing_behind():
    """The next one takes the mean."""
    run_ranks(after_an_error, 4, group_size=2)
