"""From an empty folder to a sharded model that trains on real data, and agrees.

Generates a sharded embedding, proves it on 1 to 4 ranks, then trains `train_digits.py` twice:
in one process, and on two ranks of torchrun. Ends with status 1 if the two disagree.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
SCRATCH = REPOSITORY / "build" / "demo"
TRAIN = REPOSITORY / "examples" / "train_digits.py"
TORCHSHARD = [sys.executable, "-m", "torchshard_cli"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LOSS_TOLERANCE = 1e-5
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def run(shown: str, command: list[str], env: dict[str, str] | None = None) -> None:
    """Show the command as a person would type it, and run it in the scratch folder."""
    print(f"\n$ {shown}", flush=True)
    result = subprocess.run(command, cwd=SCRATCH, env={**os.environ, **(env or {})})
    if result.returncode:
        sys.exit(f"demo: '{shown}' ended with status {result.returncode}")


def trained(name: str, launcher: list[str], env: dict[str, str]) -> dict:
    command = [*launcher, str(TRAIN), f"{name}.json"]
    shown = shlex.join(["torchrun", *launcher[4:]] if len(launcher) > 1 else ["python"])
    run(f"{shown} train_digits.py {name}.json", command, env)
    return json.loads((SCRATCH / f"{name}.json").read_text("utf-8"))


def table_of(alone: dict, sharded: dict) -> Table:
    table = Table(title="One process and two ranks", title_justify="left")
    table.add_column("")
    for heading in ("one process", "two ranks", "difference"):
        table.add_column(heading, justify="right")
    for epoch, (a, b) in enumerate(
        zip(alone["losses"], sharded["losses"], strict=True)
    ):
        table.add_row(
            f"loss, epoch {epoch + 1}", f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}"
        )
    a, b = alone["accuracy"], sharded["accuracy"]
    table.add_row("test accuracy", f"{a:.2%}", f"{b:.2%}", f"{abs(a - b):.2%}")
    a, b = alone["head_bytes"], sharded["head_bytes"]
    table.add_row("bytes of the head, each rank", str(a), str(b), f"x {b / a:.2f}")
    return table


def disagreements(alone: dict, sharded: dict) -> list[str]:
    pairs = list(zip(alone["losses"], sharded["losses"], strict=True))
    found = []
    if max(abs(a - b) for a, b in pairs) > LOSS_TOLERANCE:
        found.append(f"the losses differ by more than {LOSS_TOLERANCE}")
    if alone["accuracy"] != sharded["accuracy"]:
        found.append("the test accuracies differ")
    if 2 * sharded["head_bytes"] != alone["head_bytes"]:
        found.append("a rank does not hold half of the head")
    return found


def main() -> None:
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    print(f"A fresh project in {SCRATCH.relative_to(REPOSITORY)}/", flush=True)
    new_layer = ["new-layer", "ParallelEmbedding"]
    run("torchshard new-layer ParallelEmbedding", [*TORCHSHARD, *new_layer])
    target = "parallel_embedding:ParallelEmbedding"
    run(f"torchshard verify {target}", [*TORCHSHARD, "verify", target])
    found = {"PYTHONPATH": str(SCRATCH)}
    alone = trained("alone", [sys.executable], found)
    ranks = {**found, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK}
    sharded = trained("sharded", [*TORCHRUN, "--nproc-per-node", "2"], ranks)
    print()
    Console().print(table_of(alone, sharded))
    problems = disagreements(alone, sharded)
    if problems:
        sys.exit("They disagree: " + ", and ".join(problems) + ".")
    print(
        "They agree: the same loss in every epoch and the same test accuracy, while each"
        "\nrank held half of the head."
    )


if __name__ == "__main__":
    main()
