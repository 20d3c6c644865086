"""Every command where something is in its way: it is done whole, or nothing has changed."""

import builtins
import copy
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_project import Project, contents, write
from torchshard_cli.screen.ask import ask_about_conflicts

WRITING = {
    "new-layer": ("new-layer", "TinyOther"),
    "force": ("new-layer", "ParallelTiny", "--force"),
    "update": ("update", "--all"),
    "destroy": ("destroy", "ParallelTiny", "--force"),
}
READING = {
    "check": ("check",),
    "diff": ("diff",),
    "dry update": ("update", "--all", "--dry-run"),
    "dry destroy": ("destroy", "ParallelTiny", "--dry-run"),
}


def make_project(folder):
    """A layer that is generated and edited, whose template then changed and lost a file."""
    project = Project(folder)
    write(project.template / "{{cookiecutter._out}}" / "NOTES.md", "notes\n")
    project.generate()
    (project.template / "{{cookiecutter._out}}" / "NOTES.md").unlink()
    write(project.module, project.module.read_text("utf-8") + "mine = 'é'\n")
    project.edit_template()
    return project


def copied(project, folder):
    """The same project in another folder, which takes less time than to make it."""
    shutil.copytree(project.root.parent, folder)
    other = copy.copy(project)
    for name, path in vars(project).items():
        setattr(other, name, folder / path.relative_to(project.root.parent))
    return other


@pytest.fixture
def project(tmp_path):
    return make_project(tmp_path)


def run(project, command):
    return project.run(*{**WRITING, **READING}[command])


def finished(project, command, folder):
    """What the command makes of the project where nothing is in its way."""
    other = copied(project, folder)
    assert run(other, command).exit_code == 0
    assert other.contents() != project.contents()
    return other.contents()


@contextmanager
def interfering(monkeypatch, root, interfere):
    """Call `interfere` before every call that changes something under `root`."""
    names = {os: ("replace", "unlink", "mkdir", "rmdir", "rename"), io: ("open",)}
    places = [(module, name) for module in names for name in names[module]]
    with monkeypatch.context() as patch:
        for module, name in [*places, (builtins, "open")]:
            real = getattr(module, name)

            def wrapped(path, *arguments, real=real, name=name, **keywords):
                mode = str([*arguments, keywords.get("mode", "")][0])
                changes = name != "open" or set(mode) & set("wxa+")
                is_ours = not isinstance(path, int) and root in Path(path).parents
                if changes and is_ours:
                    interfere(name, path)
                return real(path, *arguments, **keywords)

            patch.setattr(module, name, wrapped)
        yield


class Countdown:
    """Acts at the n-th call that it is told of."""

    def __init__(self, number, act):
        self.number = number
        self.act = act
        self.calls = []

    def __call__(self, name, path):
        self.calls.append((name, Path(path).name))
        if len(self.calls) == self.number:
            self.act(path)


def refuse(code):
    def act(path):
        raise OSError(code, os.strerror(code), str(path))

    return act


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("new-layer", errno.EROFS),
        ("force", errno.EACCES),
        ("update", errno.ENOSPC),
        ("destroy", errno.EIO),
    ],
)
def test_a_refusal_at_any_step_changes_nothing(tmp_path, monkeypatch, command, code):
    """Each call that changes anything fails in turn: exit code 1 and a line that says so.

    But where all was done, and only what had been needed for it could not be removed: then
    it is exit code 0, and the next run removes it.
    """
    original = make_project(tmp_path / "original")
    before, after = original.contents(), finished(original, command, tmp_path / "done")
    number = 0
    while True:
        number += 1
        project = copied(original, tmp_path / str(number))
        countdown = Countdown(number, refuse(code))
        with interfering(monkeypatch, project.root, countdown):
            result = run(project, command)
        if len(countdown.calls) < number:
            break
        where = f"at {countdown.calls[number - 1]}: {result.output}"
        if result.exit_code == 0:
            project.run("update", "ParallelTiny", "--dry-run")
            assert project.contents() == after, where
        else:
            assert result.exit_code == 1, where
            assert re.fullmatch(
                rf"Error: cannot write .*: {os.strerror(code)}; nothing was written\n",
                result.stderr,
            ), where
            assert project.contents() == before, where
    assert number > 8
    assert ("replace", "journal.tmp") in countdown.calls  # it is there whole, or not
    assert project.contents() == after


class FullFile:
    """A file that takes half of what is written to it."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def write(self, content):
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_that_fills_up_midway_changes_nothing(
    project, monkeypatch, command, number
):
    """Half of a file is written and no more; none of it is left."""
    before = project.contents()
    real, opened = Path.open, []

    def open_full(path, mode="r", *arguments, **keywords):
        file = real(path, mode, *arguments, **keywords)
        if project.root not in path.parents or mode != "xb":
            return file
        opened.append(path)
        return FullFile(file) if len(opened) == number else file

    monkeypatch.setattr(Path, "open", open_full)
    result = run(project, command)
    if len(opened) >= number:
        assert result.exit_code == 1
        assert "No space left on device; nothing was written" in result.stderr
        assert project.contents() == before


def test_what_cannot_be_put_back_is_said(project, monkeypatch):
    """With the place of the old text, which is kept."""
    old = project.module.read_bytes()

    def fail_twice(source, target):
        if Path(target).name == "lock.json" or str(source).endswith("-old"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        os.rename(source, target)

    monkeypatch.setattr(os, "replace", fail_twice)
    result = project.run("update", "--all")
    assert result.exit_code == 1
    assert "nothing was written" not in result.stderr
    found = re.search(
        rf"cannot put back .*{project.module} \(as it was: (.*?)\)", result.stderr
    )
    assert found is not None
    assert Path(found[1]).read_bytes() == old


def kill(path):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_at(project, monkeypatch, command, number):
    """Whether a process that runs the command is killed at its n-th change."""
    child = os.fork()
    if child == 0:
        with interfering(monkeypatch, project.root, Countdown(number, kill)):
            run(project, command)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def is_left_over(path):
    return "torchshard-" in path or "journal" in path


def without_leftovers(found):
    return {path: text for path, text in found.items() if not is_left_over(path)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked to be killed")
@pytest.mark.parametrize("command", WRITING)
def test_a_run_that_is_killed_is_finished_or_never_was(tmp_path, monkeypatch, command):
    """SIGKILL at each change in turn.

    Without a journal nothing has changed or all has. With one, the next command, whichever
    it is, finishes the work first. In the end nothing is left over.
    """
    original = make_project(tmp_path / "original")
    before, after = original.contents(), finished(original, command, tmp_path / "done")
    number, seen = 1, set()
    while True:
        project = copied(original, tmp_path / str(number))
        if not killed_at(project, monkeypatch, command, number):
            break
        found = project.contents()
        if ".torchshard/journal.json" in found:
            seen.add("journal")
            project.run("check")
            assert project.contents() == after
        elif without_leftovers(found) == before:
            seen.add("nothing")
            assert run(project, command).exit_code == 0
            assert project.contents() == after
        else:
            seen.add("all")
            assert without_leftovers(found) == after
        number += 1
    assert {"journal", "nothing"} <= seen
    assert project.contents() == after


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process is forked to be killed")
def test_a_first_layer_that_was_cut_short_is_finished(tmp_path, monkeypatch):
    """Where there is no lock yet, the journal alone shows where the project is."""
    project = Project(tmp_path)
    moves = []

    def kill_at_lock(name, path):
        moves.append(Path(path).name)
        if moves[-1].startswith(".lock.json") and name == "replace":
            kill(path)

    child = os.fork()
    if child == 0:
        with interfering(monkeypatch, project.root, kill_at_lock):
            project.run("new-layer", "ParallelTiny")
        os._exit(0)
    os.waitpid(child, 0)
    assert not project.lock.exists()
    assert project.run("check", "--strict").exit_code == 0
    assert len(project.contents()) == 4


@pytest.mark.parametrize("answer", ["y\n", "m\n"])
def test_an_edit_made_while_the_question_stands_is_not_lost(
    project, monkeypatch, answer
):
    """Whatever the answer was: nothing is written, and the error says why."""

    def ask_slowly(plan):
        write(project.module, project.module.read_text("utf-8") + "saved since\n")
        return ask_about_conflicts(plan)

    monkeypatch.setattr("torchshard_cli.main.is_interactive", lambda: True)
    monkeypatch.setattr("torchshard_cli.main.ask_about_conflicts", ask_slowly)
    expected = project.contents()
    expected["zoo/parallel_tiny.py"] += b"saved since\n"
    result = project.run("new-layer", "ParallelTiny", text=answer)
    assert (result.exit_code, result.stderr) == (
        1,
        "Error: zoo/parallel_tiny.py was changed in the meantime; nothing was written. "
        "Run this again\n",
    )
    assert project.contents() == expected


@pytest.fixture
def interrupted(project, monkeypatch):
    """A project whose update was killed after it had moved its first file."""

    def kill_at_second(name, path):
        moved.append(name == "replace" and Path(path).suffix == ".torchshard-new")
        if moved.count(True) == 2:
            kill(path)

    moved = []
    child = os.fork()
    if child == 0:
        with interfering(monkeypatch, project.root, kill_at_second):
            project.run("update", "--all")
        os._exit(0)
    os.waitpid(child, 0)
    assert (project.root / ".torchshard" / "journal.json").is_file()
    return project


def test_an_edit_made_after_a_kill_is_not_written_over(interrupted):
    """The next run stops and says where the new text is."""
    pending = next(
        path
        for path in (interrupted.module, interrupted.test)
        if list(path.parent.glob(f".{path.name}.*-new"))
    )
    write(pending, "mine since\n")
    result = interrupted.run("update", "--all")
    assert result.exit_code == 1
    assert f"{pending} was changed since; nothing was written" in result.stderr
    (place,) = re.findall(r"Take what you need from (\S+),", result.stderr)
    assert Path(place).is_file()
    assert pending.read_text("utf-8") == "mine since\n"


OUTSIDE = {"path": "../outside", "temporary": None, "backup": None, "old_hash": ""}


@pytest.mark.parametrize(
    "text", ["{", "[3]", '[{"path": null}]', json.dumps([OUTSIDE])]
)
def test_a_journal_that_cannot_be_read_is_refused(project, text):
    """Exit code 2, whatever the command, and nothing written."""
    write(project.root / ".torchshard" / "journal.json", text)
    before = project.contents()
    for command in (*WRITING, *READING):
        result = run(project, command)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("Error: ")
    assert project.contents() == before


@pytest.mark.parametrize("command", READING)
def test_what_only_reads_writes_nothing(project, monkeypatch, command):
    """Not a single call that would change anything: it works where nothing can be written."""
    expected = run(project, command)

    def fail(name, path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with interfering(monkeypatch, project.root, fail):
        result = run(project, command)
    assert (result.exit_code, result.output) == (expected.exit_code, expected.output)


@pytest.mark.parametrize("command", [*WRITING, *READING])
@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_home_is_not_needed(project, tmp_path, monkeypatch, command, kind):
    """Neither one that is missing nor one that cannot be a folder is looked at."""
    home = tmp_path / "home"
    if kind == "a file":
        write(home, "")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    assert run(project, command).exit_code in (0, 1)
    assert not home.is_dir()


def environment(**variables):
    kept = {
        name: value for name, value in os.environ.items() if name in ("PATH", "HOME")
    }
    return {**kept, **variables}


LOCALES = {
    "C": environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    "latin-1": environment(LC_ALL="C", PYTHONIOENCODING="latin-1"),
    "UTF-8": environment(LC_ALL="C.UTF-8"),
}
RUN = """
import sys
from pathlib import Path
from torchshard_cli.main import main
main(sys.argv[2:], obj=Path(sys.argv[1]), prog_name="torchshard")
"""


def run_apart(project, command, *options, **keywords):
    arguments = (*{**WRITING, **READING}[command], *options)
    if arguments[0] == "new-layer":
        arguments = (*arguments, "--into", "zoo")
    return subprocess.run(
        [sys.executable, "-c", RUN, project.templates, *arguments],
        cwd=project.root,
        capture_output=True,
        check=False,
        **keywords,
    )


@pytest.mark.parametrize(
    "locale",
    ["C", *(pytest.param(n, marks=pytest.mark.prove) for n in ("latin-1", "UTF-8"))],
)
def test_no_locale_stops_a_command(tmp_path, locale):
    """In a folder with letters of all kinds, every command writes what it writes elsewhere."""
    for command in ("diff", "check", "update", "new-layer", "destroy"):
        project = make_project(tmp_path / command / "Übung 1 — ça 日本")
        write(project.module, project.module.read_text("utf-8") + "# — 日本\n")
        other = make_project(tmp_path / command / "plain")
        write(other.module, project.module.read_text("utf-8"))
        done = run_apart(project, command, env=LOCALES[locale])
        expected = run(other, command)
        assert done.returncode == expected.exit_code, done.stderr
        assert b"Traceback" not in done.stderr
        assert project.contents() == other.contents()


def test_a_folder_whose_name_is_no_text_stops_no_command(tmp_path):
    """Bytes that are not UTF-8, in the path that is printed."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    try:
        project = make_project(Path(folder))
    except OSError:
        pytest.skip("this file system takes no such name")
    strict = environment(PYTHONIOENCODING="utf-8:strict")
    for command in ("diff", "check", "update", "new-layer", "destroy"):
        done = run_apart(project, command, "--json", env=strict)
        assert done.returncode in (0, 1), done.stderr
        assert b"Traceback" not in done.stderr
        assert b"/caf\xe9/project" in done.stdout


def test_a_checkout_with_crlf_works_throughout(project):
    """Templates apart, every file has CRLF: merged, updated and removed alike."""
    for path in project.root.rglob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert project.run("update", "--all").exit_code == 0
    assert b"twice = 8\r\n" in project.module.read_bytes()
    assert project.run("check").exit_code == 0
    assert project.run("diff").output.count("\n+") == 2
    for path in project.root.rglob("*.py"):
        assert re.search(rb"(?<!\r)\n", path.read_bytes()) is None
    assert project.run("destroy", "ParallelTiny", "--force").exit_code == 0
    assert project.init.read_bytes() == b'"""The zoo."""\r\n'


def test_a_link_as_package_works_throughout(tmp_path):
    """The package is a link to a folder beside it, and the root is reached by a link."""
    project = Project(tmp_path)
    (project.root / "zoo").rename(project.root / "real")
    (project.root / "zoo").symlink_to("real")
    (tmp_path / "link").symlink_to("project")
    project.root = tmp_path / "link"
    before = project.contents()
    project.generate()
    write(project.module, project.module.read_text("utf-8") + "mine = 1\n")
    project.edit_template()
    assert project.run("update", "--all").exit_code == 0
    assert project.run("check").exit_code == 0
    text = (project.root / "real" / "parallel_tiny.py").read_text("utf-8")
    assert "twice = 8" in text
    assert "mine = 1" in text
    assert project.run("destroy", "ParallelTiny", "--force").exit_code == 0
    assert project.contents() == before
    assert (project.root / "zoo").is_symlink()


def test_a_link_out_of_the_project_is_refused_by_every_command(project, tmp_path):
    """Exit code 2, and what lies outside is untouched."""
    outside = write(tmp_path / "outside.py", "theirs = 1\n")
    project.module.unlink()
    project.module.symlink_to(outside)
    before = project.contents()
    for command in ("update", "destroy", "check", "diff", "force"):
        result = run(project, command)
        assert result.exit_code == 2, command
        assert "leads out of" in result.stderr
    assert project.contents() == before
    assert outside.read_text("utf-8") == "theirs = 1\n"


def test_a_folder_in_the_place_of_a_file_is_refused_by_every_command(project):
    """Exit code 2, and the folder stays."""
    project.module.unlink()
    inner = write(project.module / "mine.txt", "mine\n")
    for command in ("update", "destroy", "check", "diff", "force"):
        assert run(project, command).exit_code == 2, command
    assert inner.is_file()


PATIENT = "from torchshard_cli.project import alone\nalone.WAIT_S = 100\n"


def start(project, *arguments):
    """The command line in a process of its own, which waits long: CI may be slow."""
    return subprocess.Popen(
        [sys.executable, "-c", PATIENT + RUN, project.templates, *arguments],
        cwd=project.root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def test_runs_at_the_same_moment_end_as_one_after_the_other(tmp_path):
    """Updates of everything, a destroy and a new layer: no edit lost, no file left over."""
    project = make_project(tmp_path)
    project.run("new-layer", "TinyOther")
    project.edit_template("width =", "breadth =")
    runs = [
        start(project, "update", "--all"),
        start(project, "new-layer", "TinyThird", "--into", "zoo"),
        start(project, "destroy", "TinyOther"),
        start(project, "update", "ParallelTiny"),
        start(project, "check"),
    ]
    shown = [run.communicate(timeout=200)[0].decode() for run in runs]
    assert [run.returncode for run in runs][:4] == [0] * 4, shown
    assert not any("Traceback" in text for text in shown)
    text = project.module.read_text("utf-8")
    assert "breadth = 5" in text
    assert "mine = 'é'" in text
    assert sorted(contents(project.root)) == [
        ".torchshard/lock.json",
        "tests/test_parallel_tiny.py",
        "tests/test_tiny_third.py",
        "zoo/__init__.py",
        "zoo/parallel_tiny.py",
        "zoo/tiny_third.py",
    ]
    assert project.run("check").exit_code == 0
