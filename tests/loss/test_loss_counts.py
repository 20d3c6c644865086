"""What the losses cost, in numbers that do not depend on the machine: calls, bytes, memory."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import torchshard as ts
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torchshard.layout import balanced_ranges
from torchshard.testing.ranks import run_ranks

ROWS, CLASSES, FEATURES = 6, 23, 5
ONE_GATHER = {"_allgather_base_": 1}
TWO_REDUCES = {"allreduce_": 2}
MIB = 1 << 20
SCRATCH = 4 * MIB


class Traffic(TorchDispatchMode):
    """Counts collectives by name, and the bytes this rank hands to each of them."""

    def __init__(self):
        super().__init__()
        self.calls, self.given = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._overloadpacket.__name__
            self.calls[name] = self.calls.get(name, 0) + 1
            given = args[1] if name == "_allgather_base_" else args[0]
            tensors = [given] if isinstance(given, torch.Tensor) else given
            self.given += sum(tensor.nbytes for tensor in tensors)
        return func(*args, **kwargs or {})


def peak_bytes(step):
    """Return by how much torch's allocator is above where it was, at most, during `step`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    assert memory, "nothing was allocated: the profiler does not see memory"
    now = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def logits_loss(rows, classes, probable=False, **options):
    """Return this rank's logits, a leaf, and a function that gives their loss."""
    ranges = balanced_ranges(classes, dist.get_world_size())
    logits = torch.randn(rows, ranges.lengths[dist.get_rank()], requires_grad=True)
    shard = ts.ShardedTensor.from_local(logits, 1, ranges=ranges)
    target = torch.arange(rows) % classes
    if probable:
        target = torch.full((rows, classes), 1 / classes)
    return logits, lambda: ts.nn.functional.parallel_cross_entropy(
        shard, target, **options
    )


def head_loss(rows, classes, features, **options):
    """Return this rank's weight, and a function that gives the loss of a linear layer."""
    ranges = balanced_ranges(classes, dist.get_world_size())
    x = torch.randn(rows, features, requires_grad=True)
    weight = nn.Parameter(torch.randn(ranges.lengths[dist.get_rank()], features))
    target = torch.arange(rows) % classes
    return weight, lambda: ts.nn.functional.parallel_linear_cross_entropy(
        x, weight, target, ranges=ranges, **options
    )


def traffic(loss):
    """Return calls and bytes given, forward and backward."""
    with Traffic() as forward:
        value = loss()
    with Traffic() as backward:
        value.sum().backward()
    return (forward.calls, forward.given), (backward.calls, backward.given)


def costs(make, rows, options, forward, backward):
    _, loss = make(rows, options)
    assert traffic(loss) == (forward, backward), options


def plain_logits(rows, options):
    return logits_loss(rows, CLASSES, **options)


def plain_head(rows, options):
    return head_loss(rows, CLASSES, FEATURES, **options)


OPTIONS = [
    (3, {}),
    (3, {"inplace": True}),
    (3, {"reduction": "none"}),
    (3, {"weight": torch.ones(CLASSES), "ignore_index": 2}),
    (3, {"lse_square_scale": 0.1, "return_lse": False}),
    (5, {"label_smoothing": 0.1}),
    (4, {"probable": True}),
]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_loss_gathers_once(world_size):
    """Forward is one all-gather of 3 to 5 numbers a row, backward no collective."""
    run_ranks(losses_gather_once, world_size)


def losses_gather_once():
    for numbers, options in OPTIONS:
        forward = (ONE_GATHER, 4 * numbers * ROWS)
        costs(plain_logits, ROWS, options, forward, ({}, 0))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_fused_loss_adds_the_gradient_of_its_input(world_size):
    """The loss of a linear layer gathers once, and all-reduces the input's gradient."""
    run_ranks(fused_losses_gather_once, world_size)


def fused_losses_gather_once():
    for options in ({}, {"chunk_bytes": 4 * ROWS}, {"lse_square_scale": 0.1}):
        forward = (ONE_GATHER, 4 * 3 * ROWS)
        backward = ({"allreduce_": 1}, 4 * ROWS * FEATURES)
        costs(plain_head, ROWS, options, forward, backward)


@pytest.mark.parametrize(
    ("world_size", "rows", "calls"),
    [(2, 50_000, ONE_GATHER), (3, 29_127, ONE_GATHER), (3, 29_128, TWO_REDUCES)],
)
def test_many_rows_are_reduced_on_more_than_two_ranks(world_size, rows, calls):
    """A gathered packet of more than 1 MiB becomes two all-reduces, unless for two ranks."""
    run_ranks(costs, world_size, plain_logits, rows, {}, (calls, 12 * rows), ({}, 0))


def test_loss_needs_one_buffer():
    """A step allocates the gradient and little else; `inplace=True` little in all."""
    run_ranks(loss_needs_one_buffer, 2)


def loss_needs_one_buffer():
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none"}):
        logits, loss = logits_loss(256, 100_000, **options)
        size = logits.nbytes
        assert size <= peak_bytes(partial(one_pass, loss)) <= 1.05 * size, options
        logits, loss = logits_loss(256, 100_000, inplace=True, **options)
        assert peak_bytes(partial(one_pass, loss)) <= SCRATCH, options


def test_evaluation_needs_no_buffer():
    """Without gradients the loss allocates little, whatever the number of classes."""
    run_ranks(evaluation_needs_no_buffer, 2)


@torch.no_grad()
def evaluation_needs_no_buffer():
    _, loss = logits_loss(256, 40_000)
    assert peak_bytes(loss) <= SCRATCH
    _, loss = head_loss(64, 40_000, 128, chunk_bytes=MIB // 4)
    assert peak_bytes(loss) <= SCRATCH


def test_fused_loss_has_no_logits():
    """Beside the weight's gradient, or without it, a fused step takes a few chunks."""
    run_ranks(fused_loss_has_no_logits, 2)


def fused_loss_has_no_logits():
    weight, loss = head_loss(64, 40_000, 128, chunk_bytes=MIB // 4)
    peak = peak_bytes(partial(one_pass, loss))
    assert weight.nbytes <= peak <= weight.nbytes + SCRATCH, peak / MIB
    weight.grad = None
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    ts.optim.step_in_backward(optimizer, [weight])
    step = partial(one_step, loss, optimizer)
    step()  # makes the momentum
    peak = peak_bytes(step)
    assert peak <= SCRATCH, peak / MIB


def one_pass(loss):
    loss().sum().backward()


def one_step(loss, optimizer):
    one_pass(loss)
    optimizer.step()
