"""Several runs in one project at the same moment: each waits for the one before it."""

import json
import subprocess
import sys

import pytest
from cli_project import Project
from torchshard_cli.project import alone
from torchshard_cli.project.alone import alone_in

RUN = """
import sys
from pathlib import Path
from torchshard_cli.project import alone
from torchshard_cli.main import main
alone.WAIT_S = 100  # CI may be slow
main(sys.argv[2:], obj=Path(sys.argv[1]), prog_name="torchshard")
"""


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def start(project, *arguments):
    """The command line in a process of its own, started and not waited for."""
    command = [sys.executable, "-c", RUN, str(project.templates), *arguments]
    return subprocess.Popen(
        command, cwd=project.root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_layers_generated_at_the_same_moment_are_all_kept(project):
    """Four processes: four entries in the lock, four exports, and no file left over."""
    names = [f"ParallelTiny{letter}" for letter in "ABCD"]
    runs = [start(project, "new-layer", name, "--into", "zoo") for name in names]
    shown = [run.communicate(timeout=60)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, shown
    layers = json.loads(project.lock.read_text("utf-8"))["layers"]
    assert sorted(layers) == [f"zoo.{name}" for name in names]
    exports = project.init.read_text("utf-8")
    assert all(f"import {name} as {name}\n" in exports for name in names)
    assert len(project.contents()) == 2 * 4 + 2
    assert project.run("check", "--strict").exit_code == 0


@pytest.mark.parametrize(
    "arguments", [("new-layer", "ParallelTiny"), ("update", "--all")]
)
def test_a_run_that_waited_too_long_says_so(project, monkeypatch, arguments):
    """Exit code 1, and nothing written."""
    project.generate()
    project.module.unlink()
    before = project.contents()
    monkeypatch.setattr(alone, "WAIT_S", 0.1)
    with alone_in(project.root):
        result = project.run(*arguments)
    assert (result.exit_code, result.stderr) == (
        1,
        f"Error: another torchshard has been writing in {project.root} for 0.1 s; "
        "nothing was written. Try again once it has ended\n",
    )
    assert project.contents() == before


def test_what_writes_nothing_does_not_wait(project, monkeypatch):
    """A dry run and a check go ahead while another run writes."""
    project.generate()
    monkeypatch.setattr(alone, "WAIT_S", 0.1)
    with alone_in(project.root):
        assert project.run("new-layer", "ParallelTiny", "--dry-run").exit_code == 0
        assert project.run("check").exit_code == 0
