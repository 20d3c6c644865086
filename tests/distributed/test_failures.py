"""A rank that fails inside a training step: the others end too, and the error says why.

Names of tests begin with the row of public reports on sharded training, T.
"""

import os
import signal
import time

import pytest
import torch
import torchshard as ts
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchshard.errors import GroupError, RankError
from torchshard.testing import run_ranks

TIMEOUT_S = 120.0
STEPS = 3


class Step(nn.Module):
    """A backbone under a data-parallel wrapper and a head that is divided, and one step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Linear(4, 6)
        self.hidden = ts.nn.ParallelLinear(6, 5, dim=1)
        self.out = ts.nn.ParallelLinear(5, 3, dim=0)

    def forward(self, x):
        return self.out(self.hidden(self.backbone(x)).relu())


def train(misbehave):
    """Train three steps; `misbehave(step, x)` runs on rank 1 and may return another input."""
    model = Step()
    model.hidden.gather_batch = True
    ts.register_ddp_parameters_to_ignore(model)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x = torch.ones(2, 4)
        if ts.distributed.get_rank() == 1:
            x = misbehave(step, x)
        wrapped(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def failure_of(body, world_size):
    """Return the error of the launch."""
    with pytest.raises(RankError) as error:
        run_ranks(body, world_size, timeout_s=TIMEOUT_S)
    return str(error.value)


def raise_in_step(step, x):
    if step == 1:
        raise ValueError("the loader of rank 1 is empty")
    return x


def rank_1_raises():
    train(raise_in_step)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_raises_ends_the_launch(world_size):
    """The first failing rank is named with its own traceback, well before the timeout."""
    text = failure_of(rank_1_raises, world_size)
    assert text.startswith(f"rank_1_raises: rank 1 of {world_size} failed first.\n")
    assert text.endswith("ValueError: the loader of rank 1 is empty\n")
    assert "in raise_in_step" in text


def raise_in_backward(step, x):
    def fail(grad):
        raise ValueError(f"the gradient of step {step} is refused")

    x.requires_grad_().register_hook(fail)
    return x


def rank_1_raises_in_backward():
    train(raise_in_backward)


def test_a_rank_that_raises_in_the_backward():
    """An error between the backward's collectives is the one that is shown."""
    text = failure_of(rank_1_raises_in_backward, 2)
    assert text.startswith("rank_1_raises_in_backward: rank 1 of 2 failed first.\n")
    assert text.endswith("ValueError: the gradient of step 0 is refused\n")


def kill_in_step(step, x):
    if step == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def rank_1_is_killed():
    train(kill_in_step)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_killed_ends_the_launch(world_size):
    """The killed rank is named, with the signal, whichever rank noticed it first."""
    text = failure_of(rank_1_is_killed, world_size)
    assert text.startswith(f"rank_1_is_killed: rank 1 of {world_size} failed first.\n")
    assert text.endswith("died with exit code -9")


def another_width(step, x):
    return torch.ones(2, 5)


def rank_1_has_another_width():
    train(another_width)


def test_a_batch_of_another_width_is_refused_by_its_rank():
    """The rank whose input does not fit raises what torch says of it."""
    text = failure_of(rank_1_has_another_width, 2)
    assert text.startswith("rank_1_has_another_width: rank 1 of 2 failed first.\n")
    assert "mat1 and mat2 shapes cannot be multiplied (2x5 and 4x6)" in text


def whole_batches_of_other_lengths(num_rows):
    """Both ranks of the model group must get the same whole input; rank 1 has another."""
    layer = ts.nn.ParallelLinear(4, 3, dim=0)
    rows = num_rows if ts.distributed.get_rank() == 1 else 2
    return layer(torch.ones(rows, 4)).sum().item()


def rows_differ():
    whole_batches_of_other_lengths(3)


def rows_differ_under_debug():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSHARD_DEBUG", "1")
        with pytest.raises(GroupError) as error:
            rows_differ()
    return str(error.value)


def test_t30_inputs_of_other_shapes_are_named():
    """T30: with TORCHSHARD_DEBUG=1 every rank names the first input that differs, and how."""
    expected = (
        "input of ParallelLinear differs between the ranks: rank 0: (2, 4), torch.float32;"
        " rank 1: (3, 4), torch.float32; rank 2: (2, 4), torch.float32. Expected the same on"
        " all ranks of a model group: the same batch, model and options."
    )
    assert run_ranks(rows_differ_under_debug, 3, timeout_s=TIMEOUT_S) == [expected] * 3


def test_without_debug_other_shapes_end_in_time():
    """Without it the launch still ends by the timeout; it may not hang."""
    failure_of(rows_differ, 2)


def values_differ():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHSHARD_DEBUG", "1")
        layer = ts.nn.ParallelLinear(4, 3, dim=0)
        x = torch.full((2, 4), float(ts.distributed.get_rank() == 1))
        with pytest.raises(GroupError) as error:
            layer(x)
    return str(error.value)


def test_t30_samples_that_differ_are_named():
    """T30: a model group whose ranks draw other samples is told which rank differs."""
    expected = (
        "input of ParallelLinear is taken for a whole tensor, the same on every rank, but on"
        " rank 1 it differs from rank 0's: rank 1 has 1.0 at [0, 0], rank 0 0.0. Give the ranks"
        " of a model group the same batch, and seed them alike."
    )
    assert run_ranks(values_differ, 3, timeout_s=TIMEOUT_S) == [expected] * 3


def skip_the_backward(step, x):
    if step == 1:
        time.sleep(600)
    return x


def rank_1_stalls():
    train(skip_the_backward)


def test_a_rank_that_stalls_is_named_at_the_timeout():
    """No hang: the launch ends at the timeout and names the ranks that did not finish."""
    with pytest.raises(RankError) as error:
        run_ranks(rank_1_stalls, 2, timeout_s=4.0)
    assert "rank_1_stalls: rank" in str(error.value)
