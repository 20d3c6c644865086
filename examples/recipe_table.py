"""Print that a DDP backbone under a sharded head trains exactly like one process.

    python examples/recipe_table.py

For every world, every way to divide the head and every reduction of the loss: the gradient of
the backbone divided by that of one process on all samples, its smallest and largest element.
The recipe as TorchShard documents it gave 1/R over R ranks. Status 1 if one is not 1.
"""

import copy
import sys
from pathlib import Path

import torch
import torchshard as ts
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchshard.testing import run_ranks

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "training"))

from test_recipe import Classifier, dense_step, samples

WORLDS = {"2": (2, -1), "3": (3, -1), "4": (4, -1), "2 x 2": (4, 2)}
DIMS = (None, 0, 1)
REDUCTIONS = ("mean", "sum")
SAMPLES_PER_RANK = 3
TOLERANCE = 1e-10


def backbone_gradient(model: nn.Module) -> torch.Tensor:
    parts = [*model.backbone.parameters(), *model.squeeze.parameters()]
    return torch.cat([parameter.grad.flatten() for parameter in parts])


def ratios(dim: int | None, reduction: str, group_size: int) -> tuple[float, float]:
    """Return the smallest and largest element of the ratio, of one step of the recipe."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    size = world if group_size == -1 else group_size
    sizes = [SAMPLES_PER_RANK] * world
    torch.manual_seed(0)
    dense = Classifier(gather=False).double()
    model = copy.deepcopy(dense)
    model.gather = True
    ts.nn.ParallelLinear.convert_parallel_linear(model, dim=dim)
    ts.register_ddp_parameters_to_ignore(model)
    wrapped = DistributedDataParallel(model)
    x, target = (part.split(sizes)[rank] for part in samples(sizes))
    target = ts.distributed.gather(target, dim=0)
    criterion = ts.nn.ParallelCrossEntropyLoss(reduction=reduction)
    criterion(wrapped(x), target).backward()
    groups = [range(first, first + size) for first in range(0, world, size)]
    # One process on all samples; over several groups, the mean of their losses.
    losses = [dense_step(dense, sizes, group, reduction) for group in groups]
    (sum(losses) / len(losses)).backward()
    expected = backbone_gradient(dense)
    counted = expected.abs() > 1e-6
    ratio = backbone_gradient(model)[counted] / expected[counted]
    return ratio.min().item(), ratio.max().item()


def every_ratio(group_size: int) -> dict[tuple[int | None, str], tuple[float, float]]:
    return {
        (dim, reduction): ratios(dim, reduction, group_size)
        for dim in DIMS
        for reduction in REDUCTIONS
    }


def table() -> tuple[Table, float]:
    """Return the table, and the largest distance of a ratio from 1."""
    shown = Table(title="Backbone gradient / that of one process", title_justify="left")
    for heading in ("ranks", "head", "loss", "smallest ratio", "largest ratio"):
        shown.add_column(heading)
    worst = 0.0
    for label, (world_size, group_size) in WORLDS.items():
        by_rank = run_ranks(every_ratio, world_size, group_size, group_size=group_size)
        for dim, reduction in by_rank[0]:
            pairs = [ratios[dim, reduction] for ratios in by_rank]
            low, high = min(p[0] for p in pairs), max(p[1] for p in pairs)
            worst = max(worst, abs(low - 1), abs(high - 1))
            row = (label, f"dim={dim}", reduction, f"{low:.12f}", f"{high:.12f}")
            shown.add_row(*row)
        shown.add_section()
    return shown, worst


def main() -> None:
    shown, worst = table()
    Console().print(shown)
    print(f"The largest distance from 1 is {worst:.1e}.")
    if worst > TOLERANCE:
        sys.exit(f"Expected at most {TOLERANCE:.0e}.")


if __name__ == "__main__":
    main()
