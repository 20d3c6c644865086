"""How commands end: errors as JSON, and an output that cannot be written."""

import json
import os
import subprocess
import sys

import pytest
from cli_project import Project, write
from torchshard_cli.main import main
from torchshard_cli.template.catalogue import bundled_templates

RUN = [sys.executable, "-m", "torchshard_cli"]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (
            ("new-layer", "class", "--json"),
            2,
            "'class' is not a usable Python class name (keyword). Try: ParallelClass",
        ),
        (("check", "--json"), 2, None),
        (("check", "--jsn", "--json"), 2, "No such option '--jsn'"),
        (("new-layer", "ParallelTiny", "--skip", "--force", "--json"), 2, None),
        (("verify", "nowhere", "--json"), 2, None),
        (("templates", "show", "tinny", "--json"), 2, None),
    ],
)
def test_an_error_is_json_where_json_was_asked_for(
    project, arguments, exit_code, message
):
    """One object on stdout, the message on stderr as ever, the exit code unchanged."""
    result = project.run(*arguments)
    plain = project.run(*(word for word in arguments if word != "--json"))
    assert result.exit_code == plain.exit_code == exit_code
    shown = json.loads(result.stdout)
    assert shown.keys() == {"error", "exit_code"}
    assert shown["exit_code"] == exit_code
    assert shown["error"] in result.stderr
    assert result.stderr == plain.stderr
    assert plain.stdout == ""
    assert message is None or shown["error"].startswith(message)


def test_an_error_after_the_json_adds_none(project):
    """A conflict is told by the plan, which stays the only object on stdout."""
    write(project.module, "mine = 1\n")
    result = project.run("new-layer", "ParallelTiny", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["written"] is False


@pytest.mark.parametrize("arguments", [["check"], ["--help"], ["templates", "list"]])
def test_a_full_disk_is_told_in_a_line(project, arguments):
    """Exit code 1 and no traceback where the output cannot be written."""
    project.templates = bundled_templates()
    project.generate("-t", "blank")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*RUN, *arguments],
            cwd=project.root,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "Error: cannot write the output: No space left on device\n",
    )


def test_a_reader_that_left_is_no_error(project):
    """Exit code 1, and not a word."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [*RUN, "templates", "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def commands(command, words=()):
    """Every command below `command` with the words that lead to it."""
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*words, name))


@pytest.mark.parametrize(
    "words", [words for words, _ in commands(main)], ids=lambda words: " ".join(words)
)
def test_the_help_of_every_command_has_examples(project, words):
    """Below the word Example stands at least one line that begins with the program."""
    shown = project.run(*words, "--help").output
    _, found, below = shown.partition("Example")
    assert found
    assert "torchshard" in below.partition("Options:")[0]
