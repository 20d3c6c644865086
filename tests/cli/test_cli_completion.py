"""Completion: the scripts, and what a shell gets for each word."""

import os
import subprocess
import sys

import pytest
from cli_project import Project, write
from click.testing import CliRunner
from torchshard_cli.main import main
from torchshard_cli.template.catalogue import Catalogue, bundled_templates

BUNDLED = Catalogue(bundled_templates()).names()


@pytest.fixture
def project(tmp_path):
    """A project with the bundled templates, a layer, and a template of its own."""
    project = Project(tmp_path)
    project.templates = bundled_templates()
    assert project.run("new-layer", "ParallelThing", "-t", "blank").exit_code == 0
    made = project.run("templates", "new", "mine", "--from", "linear")
    assert made.exit_code == 0, made.output
    return project


def words_after(project, typed):
    """What click's own protocol gives zsh for the last word of `typed`: (value, help)."""
    words = typed.split(" ")
    environment = {
        **os.environ,
        "_TORCHSHARD_COMPLETE": "zsh_complete",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    program = (
        "from torchshard_cli.main import main\n"
        "import sys\n"
        "try: main(prog_name='torchshard')\n"
        "finally: assert not {'torch', 'cookiecutter', 'jinja2'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project.root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    return dict(zip(lines[1::3], lines[2::3], strict=True))


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("torchshard temp", {"templates"}),
        ("torchshard templates ", {"list", "show", "new", "override", "test"}),
        ("torchshard templates show ", {*BUNDLED, "mine"}),
        ("torchshard templates new x --from mi", {"mine"}),
        ("torchshard new-layer X -t emb", {"embedding"}),
        ("torchshard new-layer --template mi", {"mine"}),
        ("torchshard new-layer ParallelTh", {"ParallelThing"}),
        ("torchshard new-layer ParallelEmb", {"ParallelEmbedding"}),
        (
            "torchshard new-layer ParallelEmbedding --set ",
            {"split=both", "split=vocabulary", "split=dim"},
        ),
        ("torchshard new-layer X -t mine --set split=c", {"split=column"}),
        ("torchshard new-layer X -t nope --set ", set()),
        ("torchshard update Par", {"ParallelThing"}),
        ("torchshard destroy Par", {"ParallelThing"}),
        ("torchshard completion ", {"bash", "zsh", "fish"}),
        ("torchshard check --tr", {"--trust"}),
        ("torchshard new-layer X --trust -t emb", {"embedding"}),
    ],
)
def test_each_word_completes_to_what_fits(project, typed, expected):
    """Without torch, cookiecutter or Jinja, so that the shell does not wait."""
    assert set(words_after(project, typed)) == expected


def test_names_come_with_help(project):
    """The title of a template and the help of an option."""
    titles = words_after(project, "torchshard new-layer X -t ")
    assert titles["embedding"].startswith("Embedding: ")
    helps = words_after(project, "torchshard new-layer X -t linear --set ")
    assert "column: output features" in helps["split=row"]


def test_a_broken_template_of_ones_own_is_no_traceback_at_the_prompt(project):
    """There is no place to say so; nothing completes."""
    write(project.root / ".torchshard/templates/mine/cookiecutter.json", "{")
    assert words_after(project, "torchshard new-layer X -t ") == {}
    assert words_after(project, "torchshard temp") != {}


@pytest.mark.parametrize(
    ("shell", "part"),
    [
        ("bash", "complete -o nosort -F _torchshard_completion torchshard"),
        ("zsh", "#compdef torchshard"),
        ("fish", "complete --no-files --command torchshard"),
    ],
)
def test_the_script_is_printed_for_each_shell(shell, part):
    """click's own, for a program called torchshard."""
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert part in result.stdout
    assert f"_TORCHSHARD_COMPLETE={shell}_complete" in result.stdout


def test_another_shell_is_a_usage_error():
    """Exit code 2, with those that there are."""
    result = CliRunner().invoke(main, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.stderr


def test_the_help_says_how_to_install_it():
    """A line to type for each shell."""
    text = CliRunner().invoke(main, ["completion", "--help"]).output
    assert "echo 'source <(torchshard completion bash)' >> ~/.bashrc" in text
    assert "echo 'source <(torchshard completion zsh)' >> ~/.zshrc" in text
    assert "~/.config/fish/completions/torchshard.fish" in text


IN_BASH = """
source <(torchshard completion bash)
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_torchshard_completion torchshard
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("torchshard templates sh", ["show"]),
        ("torchshard new-layer X -t em", ["embedding"]),
        ("torchshard new-layer X -t linear --set sp", None),
        ("torchshard new-layer X -t linear --set split =", ["both", "column", "row"]),
        ("torchshard new-layer X -t linear --set split = c", ["column"]),
        ("torchshard new-layer X -t linear --set split=c", ["split=column"]),
    ],
)
def test_bash_itself_completes(project, tmp_path, words, expected):
    """With `=` as a break between words, as bash has it, and without."""
    program = write(
        tmp_path / "bin" / "torchshard",
        f'#!/bin/sh\nexec {sys.executable} -c "from torchshard_cli.main import main; '
        'main(prog_name=\'torchshard\')" "$@"\n',
    )
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", IN_BASH.format(words=words)],
        cwd=project.root,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    whole = ["split=both", "split=column", "split=row"]
    assert done.stdout.splitlines() == (expected or whole)
