"""`torchshard diff`: what the user changed, and what the template changed, since."""

import json

import pytest
from cli_project import Project, add_line, write


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    project.generate()
    return project


def test_nothing_to_show_is_exit_code_0(project):
    """And no output."""
    result = project.run("diff")
    assert (result.exit_code, result.output) == (0, "")


def test_an_edit_is_shown_from_the_generated_text(project):
    """A unified diff; exit code 1."""
    add_line(project.module)
    result = project.run("diff", "ParallelTiny")
    assert (result.exit_code, result.output) == (
        1,
        "--- zoo/parallel_tiny.py (generated before)\n"
        "+++ zoo/parallel_tiny.py (yours)\n"
        "@@ -12,3 +12,4 @@\n"
        "     width = 5\n"
        "     doubled = 8\n"
        "     bias = True\n"
        "+mine = 1\n",
    )


def test_a_change_of_the_template_is_shown_apart(project):
    """From the generated text to what it would be now, though the file was edited too."""
    add_line(project.module)
    project.edit_template()
    result = project.run("diff")
    assert result.exit_code == 1
    yours, theirs = result.output.split("+++ zoo/parallel_tiny.py (template now)\n")
    assert "+mine = 1\n" in yours
    assert "twice" not in yours
    assert "-    doubled = 8\n+    twice = 8\n" in theirs
    assert "mine = 1" not in theirs


def test_a_file_that_is_gone_is_a_difference(project):
    """All of its lines are shown as removed."""
    project.test.unlink()
    result = project.run("diff")
    assert result.exit_code == 1
    assert result.output.startswith(
        "--- tests/test_parallel_tiny.py (generated before)\n+++ /dev/null\n"
    )
    assert "-def test_width():\n" in result.output


def test_a_file_that_the_template_dropped_is_a_difference(project):
    """The template's side of it."""
    project.drop_test()
    result = project.run("diff")
    assert result.exit_code == 1
    assert (
        "--- tests/test_parallel_tiny.py (generated before)\n+++ /dev/null\n"
    ) in result.output


def test_a_file_that_is_as_the_template_gives_it_now_is_none(project):
    """Though the lock is of before."""
    old = project.lock.read_bytes()
    project.edit_template()
    project.run("update", "--all")
    project.lock.write_bytes(old)
    assert project.run("diff").exit_code == 0


def test_without_the_generated_text_the_file_itself_is_compared(project):
    """A file that is not ours, where the template has one now."""
    write(project.root / "NOTES.md", "mine\n")
    write(project.template / "{{cookiecutter._out}}" / "NOTES.md", "notes\n")
    result = project.run("diff")
    assert result.exit_code == 1
    assert "--- NOTES.md (yours)\n+++ NOTES.md (template now)\n" in result.output
    assert "-mine\n" in result.output


def test_line_ends_are_no_difference(project):
    """A checkout with CRLF is as generated."""
    project.module.write_bytes(project.module.read_bytes().replace(b"\n", b"\r\n"))
    assert project.run("diff").exit_code == 0


def test_only_the_named_layers_are_shown(project):
    """Several may be named; a name that means nothing is exit code 2."""
    project.run("new-layer", "TinyOther")
    add_line(project.module)
    assert project.run("diff", "TinyOther").exit_code == 0
    assert project.run("diff", "TinyOther", "ParallelTiny").exit_code == 1
    assert project.run("diff", "TinyOthr").exit_code == 2


def test_json_is_all_that_reaches_stdout(project):
    """Each file that differs, with both diffs."""
    add_line(project.module)
    result = project.run("diff", "--json")
    assert result.exit_code == 1
    (file,) = json.loads(result.stdout)["files"]
    assert file["path"] == "zoo/parallel_tiny.py"
    assert file["yours"].endswith("+mine = 1\n")
    assert file["template"] == ""


def test_diff_writes_nothing(project):
    """Whatever there is to show."""
    add_line(project.module)
    project.edit_template()
    before = project.contents()
    project.run("diff")
    assert project.contents() == before
