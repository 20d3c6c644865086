"""Time linear layers and attention, forward and backward, against another checkout's.

    git worktree add ../reference 3910352
    python benchmarks/layers.py --against ../reference [--rounds 30] [--ranks 1 2]

Each checkout's ranks are processes of their own, one thread each, with the same weights and
input. They wait for their turn: a round runs one checkout, then the other, in an order that
changes from round to round, so that a machine whose speed drifts slows both alike. Times are
rank 0's; those of the clock include waiting, also for other programs of a busy machine, those of
the processor do not. Prints the table of `layers.md`: ratios are those of the medians,
collectives and bytes are those of a step, bytes as a rank sends them around a ring. The step's
loss is the sum of what the caller gets; over a shard, that is a collective of one number.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from traffic import Traffic

HERE = Path(__file__).resolve()
Step = Callable[[], None]


def linear(dim: int) -> Step:
    """Return a step of 1024 -> 4096 features, or back, of 256 rows."""
    import torchshard as ts

    sizes = (1024, 4096) if dim else (4096, 1024)
    layer = ts.nn.ParallelLinear(*sizes, dim=dim)
    x = torch.randn(256, sizes[0], requires_grad=True)
    return lambda: layer(x).sum().backward()


def attention(**keywords: bool) -> Step:
    """Return a step of self-attention: 8 heads of 64, sequences of 128, 8 of them."""
    import torchshard as ts

    layer = ts.nn.ParallelMultiheadAttention(512, 8, batch_first=True)
    x = torch.randn(8, 128, 512, requires_grad=True)
    return lambda: layer(x, x, x, **keywords)[0].sum().backward()


def training(wrap: Callable[[nn.Module], Callable[..., torch.Tensor]]) -> Step:
    """Return a training step of eight small layers, where what torchshard does itself shows.

    Args:
        wrap: Returns what is called in the model's place.
    """
    import torchshard as ts

    layers = [
        part
        for index in range(8)
        for part in (ts.nn.ParallelLinear(64, 64, dim=1 - index % 2), nn.GELU())
    ]
    model = nn.Sequential(*layers)
    forward = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 64)

    def step() -> None:
        forward(x).square().sum().backward()
        ts.nn.utils.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def checkpointed(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=False)


def replicated(model: nn.Module) -> Callable[..., torch.Tensor]:
    import torchshard as ts

    ts.register_ddp_parameters_to_ignore(model)
    return nn.parallel.DistributedDataParallel(model)


STEPS: dict[str, Callable[[], Step]] = {
    "linear 1024 -> 4096, column": lambda: linear(1),
    "linear 4096 -> 1024, row": lambda: linear(0),
    "attention": lambda: attention(need_weights=False),
    "attention, with weights": lambda: attention(need_weights=True),
    "eight layers of 64, AdamW": lambda: training(lambda model: model),
    "the same, checkpointed": lambda: training(checkpointed),
}
REPLICAS = {"eight layers of 64, two replicas of two": lambda: training(replicated)}
"""Steps of four ranks, in groups of two."""


def steps_of(size: int) -> dict[str, Callable[[], Step]]:
    """Return the steps that are timed on so many ranks."""
    return REPLICAS if size == 4 else STEPS


def work(rank: int, size: int, store: str) -> None:
    """Be one rank of one checkout: for each name that is asked for, make a step and time it."""
    import torchshard as ts

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    ts.init_process_group(group_size=min(size, 2))
    steps = {}
    for name, make in steps_of(size).items():
        torch.manual_seed(0)
        steps[name] = make()
        for _ in range(3):  # DistributedDataParallel settles in its second
            steps[name]()
    traffic = {}
    for name, step in steps.items():
        with Traffic() as counted:
            step()
        traffic[name] = (counted.calls, round(counted.bytes))
    print(json.dumps([str(Path(ts.__file__).parents[1]), traffic]), flush=True)
    for line in sys.stdin:
        step = steps[line.strip()]
        dist.barrier()
        start, begun = time.perf_counter(), time.process_time()
        step()
        print(time.perf_counter() - start, time.process_time() - begun, flush=True)
    dist.destroy_process_group()


class Checkout:
    """The ranks of one checkout, that run when they are told."""

    def __init__(self, tree: Path, size: int, folder: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        store = str(Path(folder) / f"{tree.name}_{size}")
        command = [sys.executable, str(HERE), "--rank"]
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), store],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        answers = [json.loads(rank.stdout.readline()) for rank in self.ranks]
        found, self.traffic = answers[0]
        assert Path(found) == tree, f"imported {found}, not {tree}"

    def seconds(self, name: str) -> tuple[float, float]:
        """Run one step on all ranks, and return rank 0's times, of clock and processor."""
        for rank in self.ranks:
            rank.stdin.write(name + "\n")
            rank.stdin.flush()
        first, *_ = [rank.stdout.readline() for rank in self.ranks]
        clock, processor = first.split()
        return float(clock), float(processor)

    def close(self) -> None:
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait()


def measured(trees: list[Path], size: int, rounds: int) -> None:
    """Print the rows of one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = checkouts = [Checkout(tree, size, folder) for tree in trees]
        for name in steps_of(size):
            times: dict[Checkout, list[tuple[float, float]]] = {ours: [], theirs: []}
            for number in range(rounds):
                for one in checkouts if number % 2 else reversed(checkouts):
                    times[one].append(one.seconds(name))
            (new, new_cpu), (old, old_cpu) = (
                map(statistics.median, zip(*times[one], strict=True))
                for one in checkouts
            )
            calls, sent = ours.traffic[name]
            before = theirs.traffic[name]
            same = "" if before == [calls, sent] else f", was {before[0]} / {before[1]}"
            row = f"{size} | {name} | {1000 * old:.1f} | {1000 * new:.1f}"
            ratios = f"{new / old:.2f} | {new_cpu / old_cpu:.2f}"
            print(f"| {row} | {ratios} | {calls} / {sent}{same} |", flush=True)
        for one in checkouts:
            one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, size, store = arguments.rank
        work(int(rank), int(size), store)
        return
    if arguments.against is None:
        parser.error("--against PATH names the checkout to compare with")
    trees = [HERE.parents[1], arguments.against.resolve()]
    print(
        "| ranks | layer | before ms | now ms | now / before | of the processor's time"
        " | collectives / bytes |"
    )
    print("|---|---|---|---|---|---|---|")
    for size in arguments.ranks:
        measured(trees, size, arguments.rounds)


if __name__ == "__main__":
    main()
