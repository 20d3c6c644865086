"""Time the command line against `cookiecutter --help`, in turn, as whole processes.

    python benchmarks/command_line.py [rounds]

Each round runs every command once, so that a machine whose speed drifts slows all alike. The
ratio is taken round by round. Prints the table of `command_line.md`.
"""

import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

SCRIPTS = Path(sysconfig.get_path("scripts"))
COMMANDS = {
    "cookiecutter --help": ["cookiecutter", "--help"],
    "torchshard --help": ["torchshard", "--help"],
    "torchshard new-layer --help": ["torchshard", "new-layer", "--help"],
    "torchshard templates list": ["torchshard", "templates", "list"],
    "torchshard new-layer ParallelEmbedding": [
        "torchshard",
        "new-layer",
        "ParallelEmbedding",
    ],
    "torchshard new-layer ParallelConv2d": [
        "torchshard",
        "new-layer",
        "ParallelConv2d",
    ],
}


def seconds(command: list[str]) -> float:
    """Time one run, in an empty folder."""
    program = str(SCRIPTS / command[0])
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        subprocess.run(
            [program, *command[1:]], cwd=folder, check=True, stdout=subprocess.DEVNULL
        )
        return time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    for command in COMMANDS.values():
        seconds(command)  # warm: files in the page cache, bytecode written
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    reference = times["cookiecutter --help"]
    print("| command | median s | fastest s | / cookiecutter --help |")
    print("|---|---|---|---|")
    for name, measured in times.items():
        ratio = statistics.median(
            a / b for a, b in zip(measured, reference, strict=True)
        )
        median, fastest = statistics.median(measured), min(measured)
        print(f"| `{name}` | {median:.3f} | {fastest:.3f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
