"""Every command of docs/templates.md prints what the page shows, in the page's order."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_project import write

PAGE = Path(__file__).resolve().parent.parent / "docs" / "templates.md"
END = "--- end of the output"


def blocks() -> list[tuple[str, str]]:
    """Return each command of the page with the output below it."""
    found: list[tuple[str, str]] = []
    for block in re.findall(
        r"^```\n(\$ .*?)^```$", PAGE.read_text("utf-8"), re.M | re.S
    ):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.rstrip("\n")))
    return found


def outputs(folder: Path, commands: list[str]) -> list[str]:
    """Run the commands one after the other, in one shell, as a reader would."""
    program = write(
        folder / "bin" / "torchshard",
        f'#!/bin/sh\nexec {sys.executable} -m torchshard_cli "$@"\n',
    )
    program.chmod(0o755)
    environment = {key: os.environ[key] for key in os.environ if key != "COLUMNS"}
    environment["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
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


@pytest.mark.timeout(600)
def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    """To the last count of lines; `...` stands for what differs between runs."""
    expected = blocks()
    assert len(expected) > 12
    shown = outputs(tmp_path, [command for command, _ in expected])
    assert len(shown) == len(expected)
    for (command, page), output in zip(expected, shown, strict=True):
        text = "\n".join(line.rstrip() for line in output.splitlines())
        is_same = doctest.OutputChecker().check_output(
            f"{page}\n", f"{text}\n", doctest.ELLIPSIS
        )
        assert is_same, f"$ {command}\n{text}\n\nThe page shows:\n{page}"
