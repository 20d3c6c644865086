"""A page of the docs as a reader follows it: its commands in order, in one shell."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

from cli_project import write

DOCS = Path(__file__).resolve().parents[2] / "docs"
END = "--- end of the output"


def blocks(page: str) -> list[tuple[str, str]]:
    """Return each command of the page with the output below it."""
    found: list[tuple[str, str]] = []
    text = (DOCS / page).read_text("utf-8")
    for block in re.findall(r"^```\n(\$ .*?)^```$", text, re.M | re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.rstrip("\n")))
    return found


def outputs(folder: Path, commands: list[str]) -> list[str]:
    """Run the commands one after the other, in one shell, as a reader would."""
    for name, module in (("torchshard", "-m torchshard_cli"), ("python", "")):
        text = f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n'
        write(folder / "bin" / name, text).chmod(0o755)
    environment = {key: os.environ[key] for key in os.environ if key != "COLUMNS"}
    environment["PATH"] = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment.pop("TORCHSHARD_TRUST", None)
    project = folder / "project"
    project.mkdir()
    script = f"\necho '{END}'\n".join([*commands, ""])
    done = subprocess.run(
        ["bash"],
        input=script,
        cwd=project,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return [text.strip("\n") for text in done.stdout.split(END)[:-1]]


def assert_shown(page: str, folder: Path) -> None:
    """The page shows what its commands print; `...` is what differs between runs.

    Raises:
        AssertionError: With the first command of which that is not so.
    """
    expected = blocks(page)
    shown = outputs(folder, [command for command, _ in expected])
    assert len(shown) == len(expected)
    for (command, text), output in zip(expected, shown, strict=True):
        said = "\n".join(line.rstrip() for line in output.splitlines())
        is_same = doctest.OutputChecker().check_output(
            f"{text}\n", f"{said}\n", doctest.ELLIPSIS
        )
        assert is_same, f"$ {command}\n{said}\n\nThe page shows:\n{text}"
