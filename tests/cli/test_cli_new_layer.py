"""`torchshard new-layer`: what is written, where, and what happens to what is there."""

import base64
import json
import os
import pty
import subprocess
import sys
import tempfile
import zlib

import pytest
from cli_project import Project, contents, write, write_template
from torchshard_cli.project.header import read_header


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def edited(project):
    """A project whose layer was generated and then edited."""
    project.generate()
    write(project.module, project.module.read_text("utf-8") + "mine = 1\n")
    return project


def test_inside_a_package_three_files_change(project):
    """The layer lands in the package, its test in `tests`, its name in `__init__.py`."""
    result = project.run("new-layer", "ParallelTiny")
    assert result.exit_code == 0
    assert result.output == (
        "template tiny   (inferred from the name; -t to change)\n"
        "  create     zoo/parallel_tiny.py         +14\n"
        "  create     tests/test_parallel_tiny.py  +12\n"
        "  update     zoo/__init__.py              +2\n"
        "3 files written. Next: python -m pytest tests/test_parallel_tiny.py\n"
    )
    assert sorted(project.contents()) == [
        ".torchshard/lock.json",
        "tests/test_parallel_tiny.py",
        "zoo/__init__.py",
        "zoo/parallel_tiny.py",
    ]
    assert project.init.read_text("utf-8") == (
        '"""The zoo."""\n\nfrom .parallel_tiny import ParallelTiny as ParallelTiny\n'
    )


def test_the_generated_test_passes_where_it_landed(project):
    """It imports the layer by the package's name."""
    project.generate()
    run_pytest(project.root)


def test_outside_a_package_two_files_are_made_in_the_folder(project, tmp_path):
    """The test imports the module by its bare name, and passes."""
    folder = tmp_path / "plain folder"
    folder.mkdir()
    project.generate(into=str(folder))
    assert sorted(contents(folder)) == [
        ".torchshard/lock.json",
        "parallel_tiny.py",
        "test_parallel_tiny.py",
    ]
    run_pytest(folder)


def run_pytest(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def test_without_a_folder_for_tests_the_test_lies_beside_the_module(project):
    """So a package without `tests` gets no new folder."""
    project.test.parent.rmdir()
    project.generate()
    assert (project.root / "zoo" / "test_parallel_tiny.py").is_file()
    run_pytest(project.root)


def test_where_tests_mirror_the_packages_the_test_lies_as_its_module_does(project):
    """In `tests/zoo`, for a layer of `zoo`; `verify` finds it there."""
    (project.root / "tests" / "zoo").mkdir()
    project.generate()
    assert (project.root / "tests" / "zoo" / "test_parallel_tiny.py").is_file()
    assert not project.test.exists()
    run_pytest(project.root)


def test_a_src_layout_imports_from_below_src(project):
    """The root is above `src`; the import path starts below it."""
    write(project.root / "src" / "pack" / "__init__.py", "")
    write(project.root / "src" / "pack" / "nets" / "__init__.py", "")
    project.generate(into="src/pack/nets")
    assert (project.root / "src/pack/nets/parallel_tiny.py").is_file()
    test = project.test.read_text("utf-8")
    assert "from pack.nets.parallel_tiny import ParallelTiny\n" in test
    assert project.lock.is_file()


def test_paths_may_hold_spaces_and_any_letters(tmp_path):
    """A project below `Übung 1` works, and the next command is quoted."""
    project = Project(tmp_path / "Übung 1 — ça")
    project.generate()
    folder = tmp_path / "drüben und da"
    folder.mkdir()
    result = project.run("new-layer", "ParallelTiny", into=str(folder))
    assert f"Next: pytest '{folder}/test_parallel_tiny.py'\n" in result.output
    assert project.run("check").exit_code == 0


def test_the_header_tells_where_a_file_came_from(project):
    """Comments within 88 columns: template and hash, options, and the body's hash."""
    remark = "x" * 55
    project.generate("--set", f"remark={remark}")
    lines = project.module.read_text("utf-8").splitlines()
    assert lines[1].startswith("# torchshard: layer=ParallelTiny template=tiny@")
    assert lines[2] == '# torchshard: set={"bias":true}'
    assert lines[3] == f'# torchshard: set={{"remark":"{remark}"}}'
    assert lines[4] == '# torchshard: set={"split":"rows","width":4}'
    assert all(len(line) <= 88 for line in lines)


def test_the_header_alone_tells_whether_a_file_was_edited(project):
    """Also under other line endings, and without a lock."""
    project.generate()
    text = project.module.read_text("utf-8")
    assert not read_header(text).is_edited
    assert not read_header(text.replace("\n", "\r\n")).is_edited
    assert read_header(text.replace("width = 5", "width = 6")).is_edited
    assert read_header(text.replace("sha256=", "sha255=")) is None


def test_generated_files_satisfy_ruff_and_mypy(project):
    """As a user's default settings see them, header and `__init__.py` included."""
    project.generate()
    for arguments in (
        ["ruff", "check", "--isolated", "--select", "E,F,W,I", "--ignore", "F401"],
        ["ruff", "format", "--isolated", "--check"],
        ["mypy", "--cache-dir", os.devnull],
    ):
        command = [sys.executable, "-m", *arguments, "zoo"]
        subprocess.run(command, cwd=project.root, check=True, capture_output=True)


def test_a_second_run_changes_nothing(project):
    """Every file is identical, and not even the lock is written."""
    project.generate()
    before = {path: path.stat().st_mtime_ns for path in project.root.rglob("*")}
    result = project.run("new-layer", "ParallelTiny")
    assert result.output == (
        "template tiny   (as recorded; -t to change)\n"
        "  identical  zoo/parallel_tiny.py\n"
        "  identical  tests/test_parallel_tiny.py\n"
        "  identical  zoo/__init__.py\n"
        "nothing to write\n"
    )
    assert before == {path: path.stat().st_mtime_ns for path in project.root.rglob("*")}


def test_a_lost_lock_comes_back(project):
    """Files that are as generated are recorded again, so that `check` knows them."""
    project.generate()
    before = project.contents()
    project.lock.unlink()
    project.generate()
    assert project.contents() == before


def test_the_file_knows_its_options_where_the_lock_is_lost(project):
    """Nothing is rewritten to the defaults; `--set` changes one option of them."""
    project.generate("--set", "split=columns", "--set", f"remark={'x' * 55}")
    before = project.contents()
    project.lock.unlink()
    result = project.run("new-layer", "ParallelTiny")
    assert result.output == (
        "template tiny   (as recorded in the file; -t to change)\n"
        "  identical  zoo/parallel_tiny.py\n"
        "  identical  tests/test_parallel_tiny.py\n"
        "  identical  zoo/__init__.py\n"
        "nothing to write\n"
    )
    assert project.contents() == before
    project.lock.unlink()
    project.generate("--set", "width=9")
    text = project.module.read_text("utf-8")
    assert "by columns" in text
    assert "width = 10\n" in text


@pytest.mark.parametrize("options", ["1", "{", '{"width":[1]}'])
def test_a_header_that_was_tampered_with_is_none(project, options):
    """Its file is one that was not generated."""
    project.generate()
    text = project.module.read_text("utf-8")
    start, end = text.index("set=") + 4, text.index("\n# torchshard: sha256")
    assert read_header(text[:start] + options + text[end:]) is None


def test_a_lock_packed_by_another_zlib_is_left_alone(project):
    """The same text, compressed otherwise, is no reason to write the lock."""
    project.generate()
    fields = json.loads(project.lock.read_text("utf-8"))
    for file in fields["layers"]["zoo.ParallelTiny"]["files"].values():
        text = zlib.decompress(base64.b85decode(file["base"]))
        file["base"] = base64.b85encode(zlib.compress(text, 0)).decode()
    before = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    write(project.lock, before)
    project.generate()
    assert project.lock.read_text("utf-8") == before


def test_a_dry_run_writes_nothing(project):
    """It shows the plan, and with `--diff` the text."""
    before = project.contents()
    result = project.run("new-layer", "ParallelTiny", "--dry-run", "--diff")
    assert result.exit_code == 0
    assert "  create     zoo/parallel_tiny.py         +14\n" in result.output
    assert "--- /dev/null\n+++ zoo/parallel_tiny.py\n" in result.output
    assert "+from .parallel_tiny import ParallelTiny as ParallelTiny\n" in result.output
    assert result.output.endswith("dry run: nothing written\n")
    assert project.contents() == before


def test_json_is_all_that_reaches_stdout(project):
    """The plan as JSON, with the diff if asked for, and whether it was carried out."""
    shown = json.loads(
        project.run("new-layer", "ParallelTiny", "--json", "--dry-run", "--diff").stdout
    )
    assert shown["written"] is False
    assert shown["files"][0]["diff"].startswith("--- /dev/null\n")
    done = json.loads(project.run("new-layer", "ParallelTiny", "--json").stdout)
    assert done["written"] is True
    assert done["root"] == str(project.root)
    assert done["options"] == {
        "split": "rows",
        "bias": True,
        "width": 4,
        "remark": "plain",
    }
    assert done["files"][2] == {
        "path": "zoo/__init__.py",
        "status": "update",
        "added": 2,
        "removed": 0,
        "note": "",
    }


def test_an_edited_file_is_a_conflict(edited):
    """Off a terminal nothing is written, exit code 1, and the message says what to do."""
    before = edited.contents()
    result = edited.run("new-layer", "ParallelTiny", "--set", "remark=two words")
    assert result.exit_code == 1
    assert result.stdout == (
        "template tiny   (as recorded; -t to change)\n"
        "  conflict   zoo/parallel_tiny.py         (edited since it was generated: +1)\n"
        "  update     tests/test_parallel_tiny.py  +1 -1\n"
        "  identical  zoo/__init__.py\n"
    )
    assert result.stderr == (
        "Error: 1 file would be overwritten; nothing was written.\n"
        "  see it:     torchshard new-layer ParallelTiny --set 'remark=two words' "
        "--into zoo --diff\n"
        "  keep yours: --skip      take the template's: --force      combine: --merge\n"
    )
    assert edited.contents() == before


def test_a_conflict_in_json(edited):
    """The plan is on stdout, the error on stderr, the exit code 1."""
    result = edited.run("new-layer", "ParallelTiny", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["files"][0]["status"] == "conflict"
    assert json.loads(result.stdout)["written"] is False
    assert result.stderr.startswith("Error: 1 file would be overwritten")


def test_diff_shows_a_conflict_without_settling_it(edited):
    """`--diff` goes from the file to the template's text."""
    result = edited.run("new-layer", "ParallelTiny", "--diff")
    assert result.exit_code == 1
    assert "-mine = 1\n" in result.stdout


def test_skip_keeps_the_edited_file(edited):
    """The others are written, and the lock still knows the file as edited."""
    result = edited.run("new-layer", "ParallelTiny", "--skip", "--set", "width=6")
    assert result.exit_code == 0
    assert "  skip       zoo/parallel_tiny.py  " in result.output
    assert "1 file written, 1 kept." in result.output
    assert edited.module.read_text("utf-8").endswith("mine = 1\n")
    assert "width == 7" in edited.test.read_text("utf-8")
    assert edited.run("new-layer", "ParallelTiny").exit_code == 1


def test_force_takes_the_text_of_the_template(edited):
    """The edit is gone, and the layer is as generated again."""
    result = edited.run("new-layer", "ParallelTiny", "--force")
    assert result.exit_code == 0
    assert "  overwrite  zoo/parallel_tiny.py  " in result.output
    assert "mine" not in edited.module.read_text("utf-8")
    assert edited.run("check", "--strict").exit_code == 0


def test_skip_and_force_exclude_each_other(project):
    """Exit code 2."""
    result = project.run("new-layer", "ParallelTiny", "--skip", "--force")
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "Error: --skip, --force and --merge exclude each other\n"
    )


def test_a_file_of_someone_else_is_a_conflict(project):
    """A file that was not generated is not taken for one that was."""
    write(project.module, "theirs = 1\n")
    result = project.run("new-layer", "ParallelTiny")
    assert result.exit_code == 1
    assert "zoo/parallel_tiny.py         (not generated by torchshard)" in result.stdout
    assert project.module.read_text("utf-8") == "theirs = 1\n"


def test_a_binary_file_is_a_conflict(project):
    """Bytes that are no text are kept as well."""
    project.module.write_bytes(b"\xff\xfe")
    assert project.run("new-layer", "ParallelTiny").exit_code == 1
    assert project.module.read_bytes() == b"\xff\xfe"


def test_an_unedited_file_is_updated_when_the_template_changes(project):
    """No `--force` needed, also after a checkout with other line endings."""
    project.generate()
    project.module.write_bytes(project.module.read_bytes().replace(b"\n", b"\r\n"))
    project.edit_template()
    result = project.run("new-layer", "ParallelTiny")
    assert result.exit_code == 0
    assert "  update     zoo/parallel_tiny.py  " in result.output
    assert "twice = 8\n" in project.module.read_text("utf-8")


def test_an_unedited_file_is_updated_without_a_lock_too(project):
    """The header answers; an edited file stays a conflict."""
    project.generate()
    project.lock.unlink()
    project.edit_template()
    project.test.write_text(project.test.read_text("utf-8") + "# mine\n")
    result = project.run("new-layer", "ParallelTiny")
    assert "  update     zoo/parallel_tiny.py  " in result.output
    assert (
        "  conflict   tests/test_parallel_tiny.py  (edited since it was generated)\n"
        in result.output
    )


def test_a_recorded_layer_keeps_its_answers(project):
    """Template, module and options come from the lock; `--set` changes one of them."""
    project.generate("--module", "small", "--set", "split=columns", "-t", "tiny")
    project.generate("--set", "width=9")
    text = (project.root / "zoo" / "small.py").read_text("utf-8")
    assert "by columns" in text
    assert "width = 10\n" in text
    assert not project.module.exists()


def test_another_template_starts_from_its_own_defaults(project):
    """Answers given to one template mean nothing to the next."""
    write_template(project.templates, "other", width=20)
    project.generate("-t", "tiny", "--set", "width=9")
    project.generate("-t", "other")
    assert "width = 21\n" in project.module.read_text("utf-8")


def test_a_recorded_test_stays_where_it_is(project):
    """Though the project has a folder `tests` by now."""
    project.test.parent.rmdir()
    project.generate()
    project.test.parent.mkdir()
    project.generate()
    assert not project.test.exists()


def test_a_recorded_layer_does_not_move(project):
    """Another `--module` would leave the first file behind."""
    project.generate()
    result = project.run("new-layer", "ParallelTiny", "--module", "small")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: ParallelTiny is already in zoo/parallel_tiny.py; "
        "leave out --module, or choose another class name\n",
    )


def test_a_recorded_option_that_is_gone_is_forgotten(project):
    """A template may drop an option; its layers can be generated again."""
    write_template(project.templates, extra=["a", "b"])
    project.generate("--set", "extra=b")
    write_template(project.templates)
    project.generate()
    assert (
        "extra"
        not in json.loads(project.lock.read_text("utf-8"))["layers"][
            "zoo.ParallelTiny"
        ]["options"]
    )


def test_a_module_of_another_layer_is_not_taken(project):
    """Though it is unedited."""
    project.generate()
    result = project.run("new-layer", "TinyOther", "--module", "parallel_tiny")
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: zoo/parallel_tiny.py belongs to ParallelTiny; "
        "choose another file with --module NAME\n",
    )
    project.lock.unlink()
    result = project.run("new-layer", "TinyOther", "--module", "parallel_tiny")
    assert "conflict   zoo/parallel_tiny.py         (generated for ParallelTiny)" in (
        result.stdout
    )


def test_one_class_name_can_live_in_two_packages(project):
    """The lock tells them apart by package."""
    write(project.root / "park" / "__init__.py", "")
    project.test.parent.rmdir()
    project.generate()
    project.generate(into="park")
    layers = json.loads(project.lock.read_text("utf-8"))["layers"]
    assert sorted(layers) == ["park.ParallelTiny", "zoo.ParallelTiny"]


def test_a_torch_name_needs_permission(project):
    """`--allow-shadow` gives it."""
    arguments = ("new-layer", "Linear", "-t", "tiny")
    assert project.run(*arguments).exit_code == 2
    assert project.run(*arguments, "--allow-shadow").exit_code == 0


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ("none", "--into {root}/none: there is no such folder; make it first"),
        ("tests/a", "--into {root}/tests/a is a file; a folder is expected"),
        ("", "--into is empty; a folder is expected"),
        ("loop", "loop cannot be used: Too many levels of symbolic links"),
        ("x" * 300, f"{'x' * 300} cannot be used: File name too long"),
        (
            "my-zoo",
            "{root}/my-zoo holds an __init__.py, but 'my-zoo' cannot be imported; "
            "rename the folder, or pass --into another",
        ),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(project, into, message):
    """Exit code 2."""
    write(project.root / "tests" / "a", "a file")
    write(project.root / "my-zoo" / "__init__.py", "")
    (project.root / "loop").symlink_to("loop")
    result = project.run("new-layer", "ParallelTiny", into=into)
    expected = f"Error: {message.format(root=project.root)}\n"
    assert (result.exit_code, result.stderr) == (2, expected)


def test_a_folder_in_the_place_of_a_file_is_refused(project):
    """Exit code 2, and nothing written."""
    project.test.mkdir()
    result = project.run("new-layer", "ParallelTiny")
    message = "Error: tests/test_parallel_tiny.py is a folder; nothing was written\n"
    assert (result.exit_code, result.stderr) == (2, message)
    assert not project.module.exists()


@pytest.mark.parametrize("name", ["zoo/parallel_tiny.py", ".torchshard", "tests"])
def test_nothing_is_written_through_a_link_that_leaves_the_root(
    project, tmp_path, name
):
    """A file, the folder of the lock and the folder of the tests alike."""
    outside = tmp_path / "outside"
    outside.mkdir()
    link = project.root / name
    if link.is_dir():
        link.rmdir()
    link.symlink_to(outside / "x" if link.suffix else outside)
    result = project.run("new-layer", "ParallelTiny")
    assert result.exit_code == 2
    assert f"leads out of {project.root}, to {outside}" in result.stderr
    assert result.stderr.endswith("; nothing was written\n")
    assert contents(outside) == {}


def test_a_link_to_itself_in_the_place_of_a_file_is_refused(project):
    """Exit code 2, not a traceback."""
    project.module.symlink_to(project.module.name)
    result = project.run("new-layer", "ParallelTiny")
    message = f"{project.module} cannot be used: Too many levels of symbolic links"
    assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")


def test_a_link_that_stays_inside_is_written_through(project):
    """The link is still one afterwards."""
    real = write(project.root / "zoo" / "real.py", "")
    project.module.symlink_to(real)
    project.generate("--force")
    assert project.module.is_symlink()
    assert "class ParallelTiny" in real.read_text("utf-8")


RESTORE = "; restore it from version control, or delete it and generate again"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{",
            "cannot read .torchshard/lock.json: it is not JSON, line 1: "
            "Expecting property name enclosed in double quotes" + RESTORE,
        ),
        (
            "<<<<<<< yours",
            "cannot read .torchshard/lock.json: it is not JSON, line 1: "
            "Expecting value" + RESTORE,
        ),
        (
            "[]",
            "cannot read .torchshard/lock.json: it is not one that torchshard wrote"
            + RESTORE,
        ),
        (
            '{"format": 1}',
            "cannot read .torchshard/lock.json: 'layers' is missing" + RESTORE,
        ),
        (
            '{"format": 1, "layers": {"zoo.A": 3}}',
            "cannot read .torchshard/lock.json: it is not one that torchshard wrote"
            + RESTORE,
        ),
        (
            '{"format": 2, "layers": {}}',
            ".torchshard/lock.json has format 2, newer than this torchshard knows (1); "
            "upgrade torchshard",
        ),
    ],
)
def test_a_lock_that_cannot_be_read_is_refused(project, text, message):
    """Exit code 2, with what to do about it, and nothing written."""
    write(project.lock, text)
    before = project.contents()
    result = project.run("new-layer", "ParallelTiny")
    assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")
    assert project.contents() == before


def test_a_lock_cannot_lead_out_of_the_project(project):
    """Nor can one whose base text was tampered with be used."""
    project.generate()
    text = project.lock.read_text("utf-8")
    write(project.lock, text.replace('"package": "zoo"', '"package": "../zoo"'))
    result = project.run("check")
    message = "Error: '../zoo' leads out of the project\n"
    assert (result.exit_code, result.stderr) == (2, message)
    write(project.lock, text.replace('"sha256": "', '"sha256": "0'))
    assert "a base text does not match its sha256" in project.run("check").stderr


class TestOnATerminal:
    """Each conflict is a question."""

    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch):
        monkeypatch.setattr("torchshard_cli.main.is_interactive", lambda: True)

    @pytest.mark.parametrize("answer", ["", "\n", "n\n", "no\n", "x\nn\n", "d\nn\n"])
    def test_enter_and_the_end_of_input_mean_no(self, edited, answer):
        """The file is kept, the exit code is 0; an unknown answer asks again."""
        result = edited.run("new-layer", "ParallelTiny", text=answer)
        question = "zoo/parallel_tiny.py [y]es [n]o [d]iff [m]erge [a]ll [q]uit (n): "
        assert result.exit_code == 0
        assert result.output.count(question) == max(1, answer.count("\n"))
        assert result.output.endswith("nothing to write, 1 kept\n")
        assert ("-mine = 1\n" in result.output) == answer.startswith("d")
        assert edited.module.read_text("utf-8").endswith("mine = 1\n")

    @pytest.mark.parametrize("answer", ["y\n", "a\n", "YES\n"])
    def test_yes_overwrites(self, edited, answer):
        """The edit is gone."""
        result = edited.run("new-layer", "ParallelTiny", text=answer)
        assert result.exit_code == 0
        assert "mine" not in edited.module.read_text("utf-8")

    def test_a_dry_run_asks_nothing(self, edited):
        """It shows the conflict and ends with exit code 0."""
        result = edited.run("new-layer", "ParallelTiny", "--dry-run", text="y\n")
        assert result.exit_code == 0
        assert "[y]es" not in result.output
        assert "  conflict   zoo/parallel_tiny.py  " in result.output

    def test_quit_writes_nothing(self, edited):
        """Exit code 1, also if another file had been answered with yes."""
        write(edited.test, "mine = 1\n")
        before = edited.contents()
        result = edited.run("new-layer", "ParallelTiny", text="y\nq\n")
        message = "Error: quit; nothing was written\n"
        assert (result.exit_code, result.stderr) == (1, message)
        assert edited.contents() == before

    def test_all_settles_the_rest(self, edited):
        """No after the first, all after the second."""
        write(edited.test, "mine = 1\n")
        result = edited.run("new-layer", "ParallelTiny", text="n\na\n")
        assert result.exit_code == 0
        assert "mine" in edited.module.read_text("utf-8")
        assert "mine" not in edited.test.read_text("utf-8")


RUN_AND_LIST_MODULES = """
import sys
from pathlib import Path
from torchshard_cli.main import main
try:
    main({arguments!r}, obj=Path({templates!r}), prog_name="torchshard")
finally:
    heavy = {{"torch", "torchshard", "numpy", "cli"}} & set(sys.modules)
    assert not heavy, heavy
"""


def test_a_real_terminal_is_asked(edited):
    """Through a pseudo-terminal; Enter keeps the file."""
    program = RUN_AND_LIST_MODULES.format(
        arguments=["new-layer", "ParallelTiny", "--into", "zoo"],
        templates=str(edited.templates),
    )
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=edited.root,
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    os.write(leader, b"\n")
    assert process.wait(timeout=30) == 0
    shown = os.read(leader, 100_000).decode()
    os.close(leader)
    assert "zoo/parallel_tiny.py [y]es [n]o [d]iff [m]erge [a]ll [q]uit (n): " in shown
    assert edited.module.read_text("utf-8").endswith("mine = 1\n")


@pytest.mark.parametrize(
    ("arguments", "most_modules"),
    [
        (["--help"], 240),
        (["--version"], 275),
        (["templates", "list"], 275),
        (["new-layer", "ParallelTiny", "--into", "zoo"], 430),
        (["check"], 430),
    ],
)
def test_commands_start_at_once(project, arguments, most_modules):
    """In a fresh interpreter, without torch: start-up is the number of modules imported."""
    project.generate("--set", "width=5")
    program = RUN_AND_LIST_MODULES.format(
        arguments=arguments, templates=str(project.templates)
    )
    program += f"    assert len(sys.modules) <= {most_modules}, len(sys.modules)\n"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=project.root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_home_is_neither_needed_nor_touched(project, tmp_path):
    """With a home that cannot be written: in it nothing appears, and all works."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    program = RUN_AND_LIST_MODULES.format(
        arguments=["new-layer", "ParallelTiny", "--into", "zoo"],
        templates=str(project.templates),
    )
    environment = {**os.environ, "HOME": str(home)}
    environment |= {"COOKIECUTTER_CONFIG": str(tmp_path / "missing.yaml")}
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=project.root, env=environment, check=True)
    assert list(home.iterdir()) == []
    missing = {**environment, "HOME": str(tmp_path / "missing")}
    subprocess.run(command, cwd=project.root, env=missing, check=True)
    assert not (tmp_path / "missing").exists()


def test_only_the_target_and_its_lock_are_touched(project, tmp_path, monkeypatch):
    """Not even the folder for temporary files keeps anything."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    project.generate()
    assert not os.listdir(temporary)
