"""Time and weigh losses of classes that are divided over ranks, ours and others'.

    python benchmarks/loss.py [rounds]      the tables of `loss.md`
    python benchmarks/loss.py --train       train heads of 1 and 4 million classes

Two gloo ranks, one thread each, 256 rows. Each round runs every variant once on both ranks,
forward and backward; ratios are taken round by round. Processor time, of rank 0, leaves out
waiting, also for other programs of a busy machine. Memory is what torch's allocator hands
out during a step beyond what was there before, at its highest, temporaries and gradients
included. Bytes are those a rank sends if collectives go around a ring.
"""

import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchshard as ts
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.profiler import ProfilerActivity, profile
from torchshard.layout import balanced_ranges
from torchshard.testing import run_ranks
from traffic import Traffic

ROWS = 256
FEATURES = 512
MIB = 1 << 20
Step = Callable[[], None]


class ThreeReduces(torch.autograd.Function):
    """The vocab-parallel loss of Megatron-core, unfused: maximum, target logit, sum of exp.

    The exponentials are kept for backward, where they become the gradient. They lie where
    the logits were, as there, unless `keeps_logits`.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, keeps_logits: bool):
        highest = logits.amax(1)
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        highest = highest.unsqueeze(1)
        x = logits.sub(highest) if keeps_logits else logits.sub_(highest)
        first = dist.get_rank() * x.shape[1]
        elsewhere = (target < first) | (target >= first + x.shape[1])
        places = (target - first).masked_fill_(elsewhere, 0)
        picked = x[torch.arange(len(x)), places].masked_fill_(elsewhere, 0)
        dist.all_reduce(picked)
        exp_sum = x.exp_().sum(1)
        dist.all_reduce(exp_sum)
        x.div_(exp_sum.unsqueeze(1))
        ctx.save_for_backward(x, elsewhere, places)
        return exp_sum.log() - picked

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, elsewhere, places = ctx.saved_tensors
        x[torch.arange(len(x)), places] -= 1.0 - elsewhere.float()
        return x.mul_(grad.unsqueeze(1)), None, None


class SumGradient(torch.autograd.Function):
    """What every column linear does with its input: the ranks' gradients are added."""

    @staticmethod
    def forward(ctx, x: Tensor):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        dist.all_reduce(grad)
        return grad


def fetched(folder: str) -> str | None:
    """Return the path of the wheel of torchshard 0.1.0, or None if there is none to have."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", folder, "torchshard==0.1.0"], check=False)
    return next(map(str, Path(folder).glob("*.whl")), None)


def first_release(wheel: str) -> ModuleType:
    """Import torchshard 0.1.0 from its wheel, beside the torchshard that is imported."""
    ours = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "torchshard"}
    for name in ours:
        del sys.modules[name]
    sys.path.insert(0, wheel)
    try:
        old = importlib.import_module("torchshard")
        importlib.import_module("torchshard.nn.functional")
        assert old.__version__ == "0.1.0", old.__file__
    finally:
        sys.path.remove(wheel)
        for name in [n for n in sys.modules if n.split(".")[0] == "torchshard"]:
            del sys.modules[name]
        sys.modules.update(ours)
    old.distributed.init_process_group(group_size=dist.get_world_size())
    return old


def peak_bytes(step: Step) -> int:
    """Return by how much torch's allocator is above where it was, at most, during a step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(memory, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def nothing() -> None:
    pass


@dataclass
class Loss:
    """One variant of a step.

    Attributes:
        forward: Returns the loss.
        inputs: What gets a gradient; the first is the logits, or the layer's input.
        to_layer: Whether gradients go to a layer below, not into `.grad`.
        after: What follows backward and belongs to the step: an optimizer's.
        context: What forward and backward run in.
    """

    forward: Callable[[], Tensor]
    inputs: list[Tensor]
    to_layer: bool = False
    after: Step = nothing
    context: Callable[[], AbstractContextManager[None]] = nullcontext
    grads: tuple[Tensor | None, ...] = ()

    def __call__(self) -> None:
        with self.context():
            loss = self.forward()
            if self.to_layer:
                self.grads = torch.autograd.grad(loss, self.inputs)
            else:
                loss.backward()
        self.after()

    def traffic(self) -> list[int]:
        """Return the collectives and bytes of forward, then those of backward."""
        with self.context():
            with Traffic() as forward:
                loss = self.forward()
            with Traffic() as backward:
                loss.backward()
        self.clear()
        sent = round(forward.bytes), round(backward.bytes)
        return [forward.calls, sent[0], backward.calls, sent[1]]

    def answer(self) -> Tensor:
        """Return the loss and the norm of the first input's gradient: alike for all."""
        with self.context():
            loss = self.forward()
            gradient = torch.autograd.grad(loss, self.inputs)[0]
        return torch.stack([loss.detach(), gradient.norm()])

    def clear(self) -> None:
        self.grads = ()
        for tensor in self.inputs:
            tensor.grad = None


def loss_variants(classes: int, old: ModuleType | None) -> tuple[dict[str, Loss], Step]:
    """Return losses of this rank's shard of the logits, and what makes the logits anew."""
    world = dist.get_world_size()
    ranges = balanced_ranges(classes, world)
    mesh = init_device_mesh("cpu", (world,))
    target = targets(classes)
    source = torch.randn(ROWS, classes // world)
    logits = source.clone().requires_grad_()

    def three(keeps_logits: bool) -> Tensor:
        return ThreeReduces.apply(logits, target, keeps_logits).mean()

    def ours(inplace: bool) -> Tensor:
        shard = ts.ShardedTensor.from_local(logits, 1, ranges=ranges)
        return ts.nn.functional.parallel_cross_entropy(shard, target, inplace=inplace)

    def dtensor() -> Tensor:
        return F.cross_entropy(
            DTensor.from_local(logits, mesh, [Shard(1)]), target
        ).to_local()

    def release() -> Tensor:
        old.set_attribute(logits, -1)
        return old.nn.functional.parallel_cross_entropy(logits, target)

    def renew() -> None:
        logits.detach().copy_(source)

    given = [logits]
    variants = {
        "three all-reduces": Loss(lambda: three(False), given),
        "three, under a layer": Loss(lambda: three(False), given, to_layer=True),
        "three, logits kept, under a layer": Loss(
            lambda: three(True), given, to_layer=True
        ),
        "torchshard": Loss(lambda: ours(False), given),
        "torchshard, inplace": Loss(lambda: ours(True), given),
        "DTensor loss_parallel": Loss(dtensor, given, context=loss_parallel),
    }
    if old is not None:
        variants["torchshard 0.1.0"] = Loss(release, given)
    return variants, renew


def head_variants(classes: int, old: ModuleType | None) -> tuple[dict[str, Loss], Step]:
    """Return a linear layer, its weight divided over the ranks, with its loss."""
    world = dist.get_world_size()
    ranges = balanced_ranges(classes, world)
    mesh = init_device_mesh("cpu", (world,))
    target = targets(classes)
    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    weight = nn.Parameter(torch.randn(classes // world, FEATURES).mul_(0.02))
    # The same memory. What steps in backward is known by the parameter.
    stepped = nn.Parameter(weight.detach())
    sgd = torch.optim.SGD([weight], lr=1e-6, momentum=0.9)
    folded = torch.optim.SGD([stepped], lr=1e-6, momentum=0.9)
    ts.optim.step_in_backward(folded, [stepped])

    def three() -> Tensor:
        logits = F.linear(SumGradient.apply(x), weight)
        return ThreeReduces.apply(logits, target, False).mean()

    def fused(weight: Tensor) -> Tensor:
        function = ts.nn.functional.parallel_linear_cross_entropy
        return function(x, weight, target, ranges=ranges)

    def unfused(inplace: bool) -> Tensor:
        logits = F.linear(ts.distributed.copy(x), weight)
        shard = ts.ShardedTensor.from_local(logits, 1, ranges=ranges)
        return ts.nn.functional.parallel_cross_entropy(shard, target, inplace=inplace)

    def dtensor() -> Tensor:
        whole = DTensor.from_local(x, mesh, [Replicate()])
        shard = DTensor.from_local(weight, mesh, [Shard(0)])
        return F.cross_entropy(F.linear(whole, shard), target).to_local()

    def release() -> Tensor:
        logits = old.nn.functional.parallel_linear(x, weight, None, 1)
        return old.nn.functional.parallel_cross_entropy(logits, target)

    given = [x, weight]
    variants = {
        "three all-reduces": Loss(three, given),
        "torchshard, fused": Loss(lambda: fused(weight), given),
        "torchshard, linear + loss": Loss(lambda: unfused(False), given),
        "torchshard, linear + loss, inplace": Loss(lambda: unfused(True), given),
        "DTensor loss_parallel": Loss(dtensor, given, context=loss_parallel),
        "three all-reduces, step()": Loss(three, given, after=sgd.step),
        "torchshard, fused, step()": Loss(lambda: fused(weight), given, after=sgd.step),
        "torchshard, fused, step in backward": Loss(
            lambda: fused(stepped), [x], after=folded.step
        ),
    }
    if old is not None:
        variants["torchshard 0.1.0"] = Loss(release, given)
    return variants, nothing


def targets(classes: int) -> Tensor:
    """Return target classes, the same on every rank."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, classes, (ROWS,), generator=generator)


KINDS = {"loss alone": loss_variants, f"linear of {FEATURES} + loss": head_variants}


@dataclass
class Measured:
    times: list[float]
    processor: list[float]
    peak: int


def measured(
    kind: str, classes: int, rounds: int, wheel: str | None
) -> dict[str, Measured]:
    torch.manual_seed(dist.get_rank())
    old = None if wheel is None else first_release(wheel)
    variants, renew = KINDS[kind](classes, old)
    result = {}
    expect_one_answer(variants, renew)
    for name, step in variants.items():
        renew()
        step()  # what stays, such as momentum, exists from here on
        step.clear()
        renew()
        result[name] = Measured([], [], peak_bytes(step))
        step.clear()
    for _ in range(rounds):
        for name, step in variants.items():
            renew()
            dist.barrier()
            start, start_processor = time.perf_counter(), time.process_time()
            step()
            result[name].processor.append(time.process_time() - start_processor)
            result[name].times.append(time.perf_counter() - start)
            step.clear()
    return result


def expect_one_answer(variants: dict[str, Loss], renew: Step) -> None:
    """Check that it is one loss that is measured."""
    expected = None
    for name, step in variants.items():
        renew()
        answer = step.answer()
        step.after()
        expected = answer if expected is None else expected
        torch.testing.assert_close(
            answer,
            expected,
            rtol=1e-4,
            atol=0.0,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def counted(wheel: str | None) -> dict[str, dict[str, list[int]]]:
    """Return the collectives and bytes of every variant; neither depends on the classes."""
    torch.manual_seed(dist.get_rank())
    old = None if wheel is None else first_release(wheel)
    table: dict[str, dict[str, list[int]]] = {}
    for kind, make in KINDS.items():
        variants, renew = make(1200, old)
        table[kind] = {}
        for name, step in variants.items():
            renew()
            table[kind][name] = step.traffic()
            step.after()
    return table


def print_counts(wheel: str | None) -> None:
    print("| ranks | what | variant | forward | bytes | backward | bytes |")
    print("|---|---|---|---|---|---|---|")
    for world in (2, 3, 4):
        for kind, counts in run_ranks(counted, world, wheel)[0].items():
            for name, row in counts.items():
                if "step" not in name and "under" not in name:
                    cells = [world, kind, name, *row]
                    print("| " + " | ".join(map(str, cells)) + " |")


def print_times(kind: str, classes: int, rounds: int, wheel: str | None) -> None:
    result = run_ranks(measured, 2, kind, classes, rounds, wheel, timeout_s=3600)[0]
    print(f"\n{kind}, {classes:,} classes, {rounds} rounds\n")
    bases = [name for name in result if name.startswith("three")]
    print("| variant | ms |", *[f"/ {name} |" for name in bases], end=" ")
    print("processor ms |", *[f"/ {name} |" for name in bases], "extra MiB |")
    print("|---|---|---|---|" + "---|" * 2 * len(bases))
    for name, row in result.items():
        walls = [ratio(row.times, result[base].times) for base in bases]
        works = [ratio(row.processor, result[base].processor) for base in bases]
        cells = [name, milliseconds(row.times), *walls]
        cells += [milliseconds(row.processor), *works, f"{row.peak / MIB:.1f}"]
        print("| " + " | ".join(cells) + " |", flush=True)


def milliseconds(times: list[float]) -> str:
    return f"{1000 * statistics.median(times):.0f}"


def ratio(times: list[float], base: list[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(times, base, strict=True)):.2f}"


def trained(classes: int, features: int, steps: int) -> list[tuple[float, float, int]]:
    """Train a head, and return the loss, the seconds and the resident MiB of each step.

    512 rows of as many classes, far apart, are seen in turns of 256.
    """
    ranges = balanced_ranges(classes, dist.get_world_size())
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(0, classes, (2 * ROWS,), generator=generator)
    x = torch.randn(2 * ROWS, features, generator=generator)
    weight = nn.Parameter(torch.empty(ranges.lengths[dist.get_rank()], features))
    nn.init.normal_(weight, std=0.01)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    ts.optim.step_in_backward(optimizer, [weight])
    log = []
    for step in range(steps):
        start = time.perf_counter()
        rows = slice(ROWS * (step % 2), ROWS * (step % 2 + 1))
        loss = ts.nn.functional.parallel_linear_cross_entropy(
            x[rows], weight, target[rows], ranges=ranges
        )
        loss.backward()
        optimizer.step()
        log.append((loss.item(), time.perf_counter() - start, resident_mib()))
    return log


def resident_mib() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(s.split()[1]) // 1024 for s in status if s.startswith("VmRSS"))


def train() -> None:
    for classes, features in ((1_000_000, 512), (4_000_000, 256)):
        logs = run_ranks(trained, 2, classes, features, 12, timeout_s=3600)
        print(f"\n{classes:,} classes x {features}, momentum SGD in backward\n")
        print("| step | loss | seconds | resident MiB, rank 0 | rank 1 |")
        print("|---|---|---|---|---|")
        for step, (first, second) in enumerate(zip(*logs, strict=True)):
            loss, seconds, memory = first
            print(f"| {step} | {loss:.3f} | {seconds:.2f} | {memory} | {second[2]} |")


def main() -> None:
    if "--train" in sys.argv:
        train()
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        wheel = fetched(folder)
        if wheel is None:
            print("torchshard 0.1.0 could not be fetched; it is left out.\n")
        print_counts(wheel)
        for kind in KINDS:
            print_times(kind, 100_000, rounds, wheel)
            print_times(kind, 1_000_000, max(3, rounds // 4), wheel)


if __name__ == "__main__":
    main()
