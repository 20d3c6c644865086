"""`torchshard check`: drift between the files and the templates."""

import json

import pytest
from cli_project import Project, render_layer, working_in, write
from click.testing import CliRunner
from torchshard_cli.main import main
from torchshard_cli.project.lock import read_lock
from torchshard_cli.template.catalogue import Catalogue


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    project.generate()
    return project


def test_files_as_generated_are_ok(project):
    """Exit code 0, also with `--strict`."""
    result = project.run("check", "--strict")
    assert (result.exit_code, result.output) == (
        0,
        "ok        zoo/parallel_tiny.py\n"
        "ok        tests/test_parallel_tiny.py\n"
        "2 files as generated\n",
    )


def test_an_edit_is_allowed_unless_strict(project):
    """Exit code 0, and 1 with `--strict`."""
    write(project.module, project.module.read_text("utf-8") + "mine = 1\n")
    result = project.run("check")
    assert result.exit_code == 0
    assert (
        "edited    zoo/parallel_tiny.py         +1  (allowed; --strict fails on this)\n"
        in result.output
    )
    assert result.output.endswith("1 edited\n")
    assert project.run("check", "--strict").exit_code == 1


def test_a_change_of_the_template_is_drift(project):
    """Exit code 1, with what changed and the command that mends it."""
    project.edit_template()
    result = project.run("check")
    assert result.exit_code == 1
    assert (
        "outdated  zoo/parallel_tiny.py         template changed: +3 -3  "
        "run: torchshard update ParallelTiny\n"
    ) in result.output
    assert result.output.endswith("2 outdated\n")
    project.generate()
    assert project.run("check").exit_code == 0


def test_a_change_of_a_shared_partial_is_drift(project):
    """Though no file of the template itself changed."""
    macros = project.templates / "_shared" / "macros.j2"
    write(macros, macros.read_text("utf-8").replace("layer.", "module."))
    assert project.run("check").exit_code == 1


def test_an_edited_file_whose_template_changed_is_outdated(project):
    """The command that is named joins the two."""
    write(project.module, project.module.read_text("utf-8") + "mine = 1\n")
    project.edit_template()
    result = project.run("check")
    assert result.exit_code == 1
    assert (
        "outdated  zoo/parallel_tiny.py         template changed: +3 -3, "
        "edited since it was generated: +1  "
        "run: torchshard update ParallelTiny\n"
    ) in result.output


def test_a_change_of_the_recorded_options_is_told_apart(project):
    """The template is the same; the files are not yet as their new options ask."""
    text = project.lock.read_text("utf-8")
    write(project.lock, text.replace('"split": "rows"', '"split": "columns"'))
    result = project.run("check")
    assert result.exit_code == 1
    assert (
        "outdated  zoo/parallel_tiny.py         options changed: +3 -3  "
        "run: torchshard update ParallelTiny\n"
    ) in result.output


def test_a_deleted_file_is_missing(project):
    """Exit code 1."""
    project.test.unlink()
    result = project.run("check")
    assert result.exit_code == 1
    assert (
        "missing   tests/test_parallel_tiny.py  run: torchshard update ParallelTiny\n"
    ) in result.output
    assert result.output.endswith("1 missing\n")


def test_a_file_that_the_template_dropped_is_obsolete(project):
    """Exit code 1, whether it was edited or not; one that is gone is as it should be."""
    project.drop_test()
    result = project.run("check", "tests/test_parallel_tiny.py")
    assert result.exit_code == 1
    assert result.output == (
        "obsolete  tests/test_parallel_tiny.py  the template no longer writes it  "
        "run: torchshard update ParallelTiny\n1 obsolete\n"
    )
    write(project.test, project.test.read_text("utf-8") + "# mine\n")
    result = project.run("check", "tests/test_parallel_tiny.py")
    assert result.exit_code == 1
    assert "edited since it was generated: +1" in result.output
    project.test.unlink()
    assert "obsolete" not in project.run("check").output


def test_a_file_that_the_template_writes_now_is_missing(project):
    """A template may gain a file; an update makes it."""
    write(project.template / "{{cookiecutter._out}}" / "NOTES.md", "notes\n")
    result = project.run("check")
    assert result.exit_code == 1
    assert "missing   NOTES.md  " in result.output


@pytest.mark.parametrize(
    "left", ["<<<<<<< yours", "||||||| generated before", ">>>>>>> template now"]
)
def test_a_file_with_conflict_markers_is_a_conflict(project, left):
    """Exit code 1 as long as one marker of a conflict is left."""
    write(project.module, project.module.read_text("utf-8") + f"{left}\n")
    result = project.run("check")
    assert result.exit_code == 1
    assert (
        "conflict  zoo/parallel_tiny.py         "
        "holds conflict markers; settle them first\n"
    ) in result.output
    assert result.output.endswith("1 conflict\n")


def test_a_file_and_a_lock_of_different_times_are_not_ok(project):
    """Where one was restored without the other, an old file is not taken for an edit."""
    old = project.module.read_bytes()
    project.edit_template()
    assert project.run("update", "--all").exit_code == 0
    project.module.write_bytes(old)
    result = project.run("check")
    assert result.exit_code == 1
    assert "outdated  zoo/parallel_tiny.py  " in result.output
    assert project.run("update", "--all").exit_code == 0
    assert "twice = 8" in project.module.read_text("utf-8")
    write(project.module, old.decode() + "mine = 1\n")
    result = project.run("check")
    assert result.exit_code == 1
    assert (
        "its header names another state of the template than the lock  "
        "run: torchshard new-layer ParallelTiny --into zoo --diff\n"
    ) in result.output


def test_line_endings_are_no_drift(project):
    """A checkout with CRLF is as generated."""
    project.module.write_bytes(project.module.read_bytes().replace(b"\n", b"\r\n"))
    assert project.run("check", "--strict").exit_code == 0


def test_paths_narrow_the_check(project):
    """A path is taken from the working directory, which may be below the root."""
    project.test.unlink()
    assert project.run("check", "zoo/parallel_tiny.py").exit_code == 0
    assert project.run("check", str(project.test)).exit_code == 1
    with working_in(project.root / "zoo"):
        result = CliRunner().invoke(
            main, ["check", "parallel_tiny.py"], obj=project.templates
        )
    assert result.output == "ok        parallel_tiny.py\n1 file as generated\n"


def test_a_path_that_was_not_generated_is_a_usage_error(project):
    """Exit code 2."""
    result = project.run("check", "zoo/__init__.py")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: zoo/__init__.py is not in .torchshard/lock.json, "
        "so it was not generated here\n",
    )


def test_without_a_lock_there_is_nothing_to_check(project):
    """Exit code 2, with the command that makes one."""
    project.lock.unlink()
    result = project.run("check")
    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: no .torchshard/lock.json in {project.root} or above; "
        "`torchshard new-layer` writes one\n",
    )


def test_json_is_all_that_reaches_stdout(project):
    """One object for each file."""
    project.test.unlink()
    result = project.run("check", "--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["root"] == str(project.root)
    assert shown["files"][1] == {
        "path": "tests/test_parallel_tiny.py",
        "state": "missing",
        "layer": "zoo.ParallelTiny",
        "note": "",
        "remedy": "torchshard update ParallelTiny",
    }


def test_the_lock_renders_without_touching_the_disk(project):
    """Every entry gives the bytes that are on disk; a changed template gives others."""
    before = project.contents()
    (locked,) = read_lock(project.root).layers.values()
    rendered = render_layer(locked.layer, Catalogue(project.templates))
    assert {path: text.encode() for path, text in rendered.items()} == {
        path: before[path] for path in rendered
    }
    project.edit_template()
    changed = render_layer(locked.layer, Catalogue(project.templates))
    assert changed.keys() == rendered.keys()
    assert all(changed[path] != rendered[path] for path in changed)
    assert project.contents() == before


def test_check_writes_nothing(project):
    """Not even when all is drift."""
    project.edit_template()
    project.test.unlink()
    before = project.contents()
    project.run("check", "--strict", "--json")
    assert project.contents() == before
