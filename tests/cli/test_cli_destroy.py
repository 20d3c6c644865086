"""`torchshard destroy`: a generated layer is taken back, and nothing else."""

import json
import shutil

import pytest
from cli_project import Project, add_line, write
from hypothesis import given
from hypothesis import strategies as st
from test_cli_plan import CASES, UNFORMATTED
from torchshard_cli.errors import UsageError
from torchshard_cli.project.lock import read_lock
from torchshard_cli.project.package_init import add_export
from torchshard_cli.project.package_removal import remove_export


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path)
    project.generate()
    return project


def test_everything_that_was_generated_goes(tmp_path):
    """The tree is as it was before, to the byte, without a lock."""
    project = Project(tmp_path)
    before = project.contents()
    project.generate()
    result = project.run("destroy", "ParallelTiny")
    assert (result.exit_code, result.output) == (
        0,
        "  remove     zoo/parallel_tiny.py\n"
        "  remove     tests/test_parallel_tiny.py\n"
        "  update     zoo/__init__.py              -2\n"
        "1 file written, 2 files removed\n",
    )
    assert project.contents() == before
    assert sorted(path.name for path in project.root.iterdir()) == ["tests", "zoo"]


def test_an_edited_file_is_kept(project):
    """The rest goes; exit code 1, and the lock still knows the file."""
    add_line(project.test, "# mine")
    result = project.run("destroy", "ParallelTiny")
    assert (result.exit_code, result.stdout, result.stderr) == (
        1,
        "  remove     zoo/parallel_tiny.py\n"
        "  keep       tests/test_parallel_tiny.py  "
        "(edited since it was generated: +1; --force removes it)\n"
        "  update     zoo/__init__.py              -2\n"
        "1 file written, 1 file removed, 1 kept\n",
        "Error: 1 edited file kept, so ParallelTiny stays in the lock; "
        "--force removes all of it\n",
    )
    assert project.test.read_text("utf-8").endswith("# mine\n")
    locked = read_lock(project.root).find("ParallelTiny")
    assert set(locked.files) == {"tests/test_parallel_tiny.py"}
    result = project.run("check")
    assert result.exit_code == 1
    assert "missing   zoo/parallel_tiny.py  " in result.output
    assert project.run("destroy", "ParallelTiny", "--force").exit_code == 0
    assert not project.test.exists()
    assert not project.lock.exists()


def test_the_export_of_a_module_that_is_kept_stays(project):
    """The package imports as before, and the name is still in it."""
    add_line(project.module)
    before = project.init.read_bytes()
    assert project.run("destroy", "ParallelTiny").exit_code == 1
    assert project.init.read_bytes() == before
    assert project.module.is_file()
    assert not project.test.exists()


def test_a_file_that_the_user_took_away_is_no_obstacle(project):
    """What is left goes, and the lock is told."""
    add_line(project.module)
    project.run("destroy", "ParallelTiny")
    project.module.unlink()
    result = project.run("destroy", "ParallelTiny")
    assert (result.exit_code, result.output) == (
        0,
        "  update     zoo/__init__.py  -2\n1 file written\n",
    )
    assert not project.lock.exists()


def test_force_removes_edited_files(project):
    """And says that they were edited."""
    add_line(project.module)
    result = project.run("destroy", "ParallelTiny", "--force")
    assert result.exit_code == 0
    assert (
        "  remove     zoo/parallel_tiny.py         "
        "(edited since it was generated: +1)\n"
    ) in result.output
    assert not project.module.exists()


@pytest.mark.parametrize("content", [b"caf\xe9 = 1\n", b"", b"<<<<<<< yours\n"])
def test_whatever_the_edit_was_the_file_is_kept(project, content):
    """Another encoding, an empty file, an open conflict."""
    project.module.write_bytes(content)
    assert project.run("destroy", "ParallelTiny").exit_code == 1
    assert project.module.read_bytes() == content


def test_line_endings_are_no_edit(project):
    """A checkout with CRLF can be destroyed."""
    project.module.write_bytes(project.module.read_bytes().replace(b"\n", b"\r\n"))
    assert project.run("destroy", "ParallelTiny").exit_code == 0


def test_other_layers_and_files_stay(project):
    """Those of other layers, and those beside that nobody generated."""
    write(project.root / "zoo" / "parallel_tiny_notes.md", "mine\n")
    write(project.root / ".torchshard" / "notes", "mine\n")
    before = project.contents()
    project.run("new-layer", "TinyOther")
    result = project.run("destroy", "TinyOther")
    assert result.exit_code == 0, result.output
    assert project.contents() == before
    assert project.run("check", "--strict").exit_code == 0
    project.run("destroy", "ParallelTiny")
    assert (project.root / ".torchshard" / "notes").is_file()


def test_no_folder_is_removed(tmp_path):
    """One that it leaves empty stays: it may have been there before."""
    project = Project(tmp_path)
    project.run("new-layer", "ParallelTiny")
    project.run("destroy", "ParallelTiny")
    assert project.test.parent.is_dir()
    assert list(project.test.parent.iterdir()) == []


def test_the_template_is_not_needed(project):
    """A layer whose template is gone can still be destroyed."""
    shutil.rmtree(project.template)
    assert project.run("destroy", "ParallelTiny").exit_code == 0
    assert not project.module.exists()


def test_a_link_is_not_followed(project):
    """What it leads to is never removed; the link itself only with `--force`."""
    real = project.root / "zoo" / "real.py"
    project.module.rename(real)
    project.module.symlink_to("real.py")
    result = project.run("destroy", "ParallelTiny")
    assert result.exit_code == 1
    assert "(a link, which was not generated; --force removes it)" in result.stdout
    assert project.module.is_symlink()
    assert project.run("destroy", "ParallelTiny", "--force").exit_code == 0
    assert not project.module.is_symlink()
    assert real.is_file()


def test_a_dry_run_removes_nothing(project):
    """It shows what would go; exit code 0."""
    add_line(project.test, "# mine")
    before = project.contents()
    result = project.run("destroy", "ParallelTiny", "--dry-run")
    assert result.exit_code == 0
    assert "  remove     zoo/parallel_tiny.py\n" in result.output
    assert result.output.endswith("dry run: nothing written\n")
    assert project.contents() == before


def test_json_is_all_that_reaches_stdout(project):
    """With what becomes of each file."""
    add_line(project.test, "# mine")
    result = project.run("destroy", "ParallelTiny", "--json")
    assert result.exit_code == 1
    shown = json.loads(result.stdout)
    assert shown["written"] is True
    assert {file["path"]: file["status"] for file in shown["files"]} == {
        "zoo/parallel_tiny.py": "remove",
        "tests/test_parallel_tiny.py": "keep",
        "zoo/__init__.py": "update",
    }


def test_a_name_that_was_never_generated_is_a_usage_error(project):
    """Exit code 2, with the nearest."""
    result = project.run("destroy", "ParallelTini")
    assert result.exit_code == 2
    assert "Did you mean 'ParallelTiny'?" in result.stderr


@pytest.mark.parametrize(
    ("init", "line"),
    [
        ("from . import parallel_tiny\n", 1),
        ("try:\n    from .parallel_tiny import ParallelTiny\nexcept: pass\n", 2),
    ],
)
def test_a_package_that_could_not_be_imported_then_is_refused(project, init, line):
    """An import that destroy cannot take out: exit code 2, nothing removed."""
    write(project.init, init)
    before = project.contents()
    result = project.run("destroy", "ParallelTiny")
    assert (result.exit_code, result.stderr) == (
        2,
        f"Error: zoo/__init__.py: line {line} still imports 'parallel_tiny'; "
        "take that out by hand first\n",
    )
    assert project.contents() == before


def test_an_import_that_shares_its_line_is_refused(project):
    """Exit code 2, nothing removed."""
    write(project.init, "x = 1; from .parallel_tiny import ParallelTiny\n")
    before = project.contents()
    result = project.run("destroy", "ParallelTiny")
    assert result.exit_code == 2
    assert "the import on line 1 shares its line with something else" in result.stderr
    assert project.contents() == before


# Of these, adding cannot be undone to the byte: what it wrote anew is not told from before.
REWRITTEN = {
    "a list that gets too long",
    "no last comma",
    "no parentheses",
    "docstring without a newline",
    "licence right above code",
    "another name of the module",
    "many names of the module",
    "comment among names",
}


@pytest.mark.parametrize("case", sorted({*CASES, *UNFORMATTED} - REWRITTEN))
def test_removing_an_export_undoes_adding_it(case):
    """To the byte: comments, quotes, empty lines and line ends."""
    before, after = {**CASES, **UNFORMATTED}[case]
    assert remove_export(after, "middle", "Middle") == before
    assert remove_export(before, "middle", "Middle") == before


@pytest.mark.parametrize("case", sorted(REWRITTEN))
def test_removing_an_export_leaves_python_without_it(case):
    """Also where the file had been written anew for it."""
    _, after = {**CASES, **UNFORMATTED}[case]
    text = remove_export(after, "middle", "Middle")
    compile(text, "__init__.py", "exec")
    assert "iddle" not in text
    assert text.count("\n\n\n") == 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            'from .middle import *\n\n__all__ = ["A", "Middle"]\n',
            '__all__ = ["A"]\n',
        ),
        (
            "from .middle import (\n    Middle,\n    helper,\n)\n\n"
            "__all__ = ['Middle', 'Other', 'helper']\n",
            "__all__ = ['Other']\n",
        ),
        (
            "from .a import A\nfrom .middle import Middle as Mine\n"
            '__all__ = ["A", "Mine"]\n',
            'from .a import A\n__all__ = ["A"]\n',
        ),
        (
            "from .middle import Middle\n__all__ = (\n    'A', 'Middle',\n    'Z',\n)\n",
            "__all__ = (\n    'A', \n    'Z',\n)\n",
        ),
        ("from .middle import Middle  # why\nx = 1\n", "x = 1\n"),
        ('"""Doc."""\nfrom .middle import M\n', '"""Doc."""\n'),
        ("from .middles import Middle\n", "from .middles import Middle\n"),
        ("from ..middle import Middle\n", "from ..middle import Middle\n"),
    ],
)
def test_all_that_comes_from_the_module_goes(before, after):
    """Whatever was imported from it, under whatever name; and nothing else."""
    assert remove_export(before, "middle", "Middle") == after


def test_a_file_that_is_not_python_is_refused():
    """As on the way in."""
    with pytest.raises(UsageError, match="not valid Python, line 1"):
        remove_export("def broken(:\n", "middle", "Middle")


@given(
    st.permutations(["alpha", "conv2d", "conv10d", "middle", "zeta"]), st.integers(1, 5)
)
def test_exports_can_go_in_any_order(modules, count):
    """What is left is what would be there without them."""
    empty = '"""Doc."""\n\n__all__ = []\n'
    text, expected = empty, empty
    for module in modules:
        text = add_export(text, module, module.title())
    for module in modules[:count]:
        text = remove_export(text, module, module.title())
    for module in modules[count:]:
        expected = add_export(expected, module, module.title())
    assert text == expected
