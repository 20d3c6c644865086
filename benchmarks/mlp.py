"""Time column -> GELU -> row, forward and backward, against DTensor and bare collectives.

    python benchmarks/mlp.py [rounds]

Two gloo ranks, one thread each, the same weights and input. Each round runs every variant
once on both ranks; ratios are taken round by round, to the variant written with bare
collectives, which has no layer around it. Prints the table of `mlp.md`.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchshard as ts
from torch import Tensor, nn
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torchshard.testing import run_ranks

SIZES = [(8, 64, 256), (256, 512, 2048), (1024, 1024, 4096)]  # rows, features, hidden


class Bare(nn.Module):
    """The two all-reduces and nothing else: what the other variants can at best reach."""

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.contiguous().clone()
            dist.all_reduce(grad)
            return grad

    class Leave(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, hidden // 2)
        self.down = nn.Linear(hidden // 2, features)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.Enter.apply(x)))
        y = F.linear(hidden, self.down.weight)
        return self.Leave.apply(y) + self.down.bias


def torchshard_mlp(features: int, hidden: int) -> nn.Module:
    return nn.Sequential(
        ts.nn.ParallelLinear(features, hidden, dim=1),
        nn.GELU(),
        ts.nn.ParallelLinear(hidden, features, dim=0),
    )


def dtensor_mlp(features: int, hidden: int) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features)
    )
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


VARIANTS: dict[str, Callable[[int, int], nn.Module]] = {
    "bare collectives": Bare,
    "torchshard": torchshard_mlp,
    "DTensor": dtensor_mlp,
}


def step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def measured(rounds: int, rows: int, features: int, hidden: int) -> dict[str, tuple]:
    """Return each variant's times and its number of collectives a step."""
    torch.manual_seed(0)
    x = torch.randn(rows, features, requires_grad=True)
    models = {name: make(features, hidden) for name, make in VARIANTS.items()}
    counts = {}
    for name, model in models.items():
        with CommDebugMode() as mode:
            step(model, x)
        counts[name] = mode.get_total_counts()
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            dist.barrier()
            start = time.perf_counter()
            step(model, x)
            times[name].append(time.perf_counter() - start)
    return {name: (times[name], counts[name]) for name in models}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print("| rows x features x hidden | variant | median ms | / bare | collectives |")
    print("|---|---|---|---|---|")
    for sizes in SIZES:
        result = run_ranks(measured, 2, rounds, *sizes, timeout_s=600)[0]
        bare, _ = result["bare collectives"]
        for name, (times, count) in result.items():
            ratio = statistics.median(a / b for a, b in zip(times, bare, strict=True))
            median = 1000 * statistics.median(times)
            size = " x ".join(map(str, sizes))
            print(f"| {size} | {name} | {median:.2f} | {ratio:.2f} | {count} |")


if __name__ == "__main__":
    main()
