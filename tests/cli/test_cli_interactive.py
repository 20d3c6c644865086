"""Questions on a real terminal, and none anywhere else."""

import os
import pty
import select
import subprocess
import sys
import time

import pytest
from cli_project import Project, contents, write
from click import unstyle

RUN = """
import os, sys
if os.isatty(0):
    os.close(os.open(os.ttyname(0), os.O_RDWR))  # the terminal that Ctrl-C comes from
from pathlib import Path
from torchshard_cli.main import main
main(sys.argv[2:], obj=Path(sys.argv[1]), prog_name="torchshard")
"""
TIMEOUT_S = 60.0


class Terminal:
    """The command line, at a pseudo-terminal that it controls."""

    def __init__(self, project, *arguments, environment=None):
        self.leader, follower = pty.openpty()
        self.shown = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(project.templates), *arguments],
            cwd=project.root,
            env={**os.environ, "TERM": "xterm", **(environment or {})},
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
        )
        os.close(follower)

    def answer(self, question, text):
        """Wait for `question`, then type `text`."""
        end = time.monotonic() + TIMEOUT_S
        before = len(self.shown)
        while question not in self.shown[before:]:
            assert time.monotonic() < end, f"no {question!r} in {self.shown!r}"
            assert self._read(), f"ended without {question!r}: {self.shown!r}"
        if text == "\x03":
            time.sleep(0.5)  # Python sees no Ctrl-C that comes before it reads
        os.write(self.leader, text.encode())

    def end(self):
        """The exit code, once all is shown."""
        while self._read():
            pass
        os.close(self.leader)
        return self.process.wait(timeout=TIMEOUT_S)

    def _read(self):
        if not select.select([self.leader], [], [], TIMEOUT_S)[0]:
            self.process.kill()
            raise AssertionError(f"it waits for input: {self.shown!r}")
        try:
            new = os.read(self.leader, 4096).decode().replace("\r\n", "\n")
        except OSError:  # how Linux says that the other end is closed
            return False
        self.shown += new
        return bool(new)


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_every_option_is_asked_for_and_each_answer_checked_at_once(project):
    """Row 8: a bad answer is told and asked again; the plan is shown before it is written."""
    terminal = Terminal(project, "new-layer", "--into", "zoo")
    terminal.answer("class name, such as ParallelEmbedding: ", "Linear\n")
    terminal.answer("class name, such as ParallelEmbedding: ", "ParallelTiny\n")
    terminal.answer("split [rows]: ", "2\n")
    terminal.answer("bias [true]: ", "perhaps\n")
    terminal.answer("bias [true]: ", "false\n")
    terminal.answer("width [4]: ", "wide\n")
    terminal.answer("width [4]: ", "7\n")
    terminal.answer("remark [plain]: ", "\n")
    terminal.answer("write 3 files? [Y/n]: ", "\n")
    assert terminal.end() == 0
    shown = unstyle(terminal.shown)
    assert "Error: 'Linear' would shadow torch.nn.Linear" in shown
    assert "split: what each rank holds\n  1  rows\n  2  columns\n" in shown
    assert "Error: a number from 1 to 2, or a name, is expected\n" in shown
    assert "Error: width=wide is not an integer\n" in shown
    assert shown.index("  create     zoo/parallel_tiny.py") < shown.index("write 3")
    assert (
        "the same without questions: torchshard new-layer ParallelTiny --set "
        "split=columns --set bias=false --set width=7 --set remark=plain --into zoo\n"
    ) in shown
    text = project.module.read_text("utf-8")
    assert "by columns" in text
    assert "width = 8\n" in text
    assert "bias" not in text.split("class")[1]


def test_what_is_given_is_not_asked(project):
    """With `-i`, NAME and `--set`, the rest alone; Enter takes what is recorded."""
    project.generate("--set", "width=9")
    terminal = Terminal(
        project, "new-layer", "ParallelTiny", "-i", "--set", "bias=no", "--into", "zoo"
    )
    terminal.answer("split [rows]: ", "columns\n")
    terminal.answer("width [9]: ", "\n")
    terminal.answer("remark [plain]: ", "\n")
    terminal.answer("write 2 files? [Y/n]: ", "y\n")
    assert terminal.end() == 0
    assert "class name" not in terminal.shown
    assert "bias [" not in terminal.shown
    assert "width = 10\n" in project.module.read_text("utf-8")


def test_a_template_is_chosen_where_the_name_tells_none(project):
    """By number or name, each with what it generates."""
    terminal = Terminal(project, "new-layer", "ParallelOther", "-i")
    terminal.answer("template: ", "tinny\n")
    terminal.answer("template: ", "1\n")
    for question in ("split", "bias", "width", "remark"):
        terminal.answer(f"{question} [", "\n")
    terminal.answer("write 2 files? [Y/n]: ", "\n")
    assert terminal.end() == 0
    assert "  1  tiny  a tiny layer\n" in terminal.shown
    assert (project.root / "parallel_other.py").is_file()


def test_a_no_to_the_plan_writes_nothing(project):
    """Exit code 1."""
    before = project.contents()
    terminal = Terminal(project, "new-layer", "ParallelTiny", "-i")
    for question in ("split", "bias", "width", "remark"):
        terminal.answer(f"{question} [", "\n")
    terminal.answer("write 2 files? [Y/n]: ", "n\n")
    assert terminal.end() == 1
    assert "Error: nothing was written\n" in terminal.shown
    assert project.contents() == before


@pytest.mark.parametrize("key", ["\x04", "\x03"], ids=["end of input", "Ctrl-C"])
@pytest.mark.parametrize("at", ["class name", "split [", "width [", "write 2 files?"])
def test_leaving_at_any_question_writes_nothing(project, key, at):
    """Exit code 1, one word, no traceback."""
    before = project.contents()
    terminal = Terminal(project, "new-layer")
    questions = ["class name", "split [", "bias [", "width [", "remark [", "write 2"]
    for question in questions:
        is_here = at.startswith(question)
        typed = "ParallelTiny\n" if question == "class name" else "\n"
        terminal.answer(question, key if is_here else typed)
        if is_here:
            break
    assert terminal.end() == 1
    assert terminal.shown.endswith("Aborted!\n")
    assert "Traceback" not in terminal.shown
    assert project.contents() == before


def test_a_plain_command_asks_nothing_on_a_terminal_either(project):
    """A script that runs on a terminal never waits."""
    terminal = Terminal(project, "new-layer", "ParallelTiny")
    assert terminal.end() == 0
    assert "?" not in terminal.shown
    assert (project.root / "parallel_tiny.py").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new-layer",), "Error: Missing argument 'NAME'.\n"),
        (("new-layer", "--json"), "Error: Missing argument 'NAME'.\n"),
        (
            ("new-layer", "ParallelTiny", "-i"),
            "Error: --interactive needs a terminal; pass NAME, -t TEMPLATE and "
            "--set KEY=VALUE  (see: torchshard templates show TEMPLATE)\n",
        ),
    ],
)
def test_off_a_terminal_nothing_is_asked(project, arguments, message):
    """Exit code 2 and what to pass instead, also where stdin holds answers."""
    before = project.contents()
    result = project.run(*arguments, text="ParallelTiny\n\n\n\n\ny\n")
    assert result.exit_code == 2
    assert result.stderr.endswith(message)
    assert project.contents() == before


def test_questions_and_json_exclude_each_other(project):
    """On a terminal too: the output is JSON alone."""
    terminal = Terminal(project, "new-layer", "ParallelTiny", "-i", "--json")
    assert terminal.end() == 2
    assert "Error: --interactive and --json exclude each other\n" in terminal.shown


def test_a_template_that_is_not_trusted_asks_nothing(project):
    """Exit code 4 before the first question."""
    project.run("templates", "new", "mine", "--from", "tiny")
    terminal = Terminal(project, "new-layer", "ParallelMine", "-i")
    assert terminal.end() == 4
    assert "split [" not in terminal.shown


def test_an_edited_file_is_still_a_question_of_its_own(project):
    """Its answer comes first, then the plan's; both noes keep all."""
    project.generate()
    write(project.module, project.module.read_text("utf-8") + "mine = 1\n")
    before = project.contents()
    terminal = Terminal(project, "new-layer", "ParallelTiny", "-i", "--into", "zoo")
    for question in ("split", "bias", "width", "remark"):
        terminal.answer(f"{question} [", "\n")
    terminal.answer("[q]uit (n): ", "\n")
    assert terminal.end() == 0
    assert contents(project.root) == before


ESCAPE = "\x1b["


@pytest.mark.parametrize(
    ("environment", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True)],
)
def test_colours_are_for_terminals_and_can_be_refused(
    project, environment, is_coloured
):
    """NO_COLOR with any text switches them off."""
    terminal = Terminal(
        project, "new-layer", "ParallelTiny", "--dry-run", environment=environment
    )
    assert terminal.end() == 0
    assert (ESCAPE in terminal.shown) == is_coloured


def test_a_pipe_gets_no_colours(project):
    """Neither stdout nor stderr."""
    command = [sys.executable, "-c", RUN, str(project.templates), "new-layer"]
    done = subprocess.run(
        [*command, "ParallelTiny"], cwd=project.root, capture_output=True, text=True
    )
    assert "create" in done.stdout
    assert ESCAPE not in done.stdout + done.stderr


@pytest.mark.prove
def test_testing_a_template_shows_how_far_it_is(project):
    """A bar with the choice, which is gone at the end; the table stays."""
    terminal = Terminal(project, "templates", "test", "tiny")
    assert terminal.end() == 0
    assert "tiny: split=columns" in unstyle(terminal.shown)
    assert "3 renderings passed\n" in terminal.shown
