"""What people complained of in other scaffolders: a test for each complaint.

The rows are numbered as in the list that the command line was designed by; each docstring
names a public report of the complaint.
"""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_project import (
    LAYER,
    MODULE_PATH,
    Project,
    edit,
    render_layer,
    write,
    write_template,
)
from torchshard_cli.project.header import read_header
from torchshard_cli.project.layer import Layer
from torchshard_cli.project.lock import read_lock
from torchshard_cli.template.catalogue import Catalogue, bundled_templates

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.fixture
def edited(project):
    """A layer that was generated, and then edited in a line and below its end."""
    project.generate()
    text = project.module.read_text("utf-8")
    write(project.module, text.replace("A plain", "My") + "mine = 1\n")
    return project


@pytest.fixture
def torn(project):
    """A layer in which the user and then the template changed the same line."""
    project.generate()
    edit(project.module, "doubled = 8", "doubled = 80")
    project.edit_template()
    return project


def test_row_1_a_module_and_its_test_join_an_existing_package(project):
    """cookiecutter #1190: one file of the user's in the way, and nothing is written."""
    write(project.root / "zoo" / "own.py", "mine = 1\n")
    write(project.test, "theirs = 1\n")
    before = project.contents()
    assert project.run("new-layer", "ParallelTiny").exit_code == 1
    assert project.contents() == before
    project.test.unlink()
    project.generate()
    made = project.contents()
    assert made.keys() - before.keys() == {
        ".torchshard/lock.json",
        "zoo/parallel_tiny.py",
    }
    assert made["zoo/own.py"] == b"mine = 1\n"


@pytest.mark.parametrize("there", [None, "as generated", "edited", "foreign", "empty"])
def test_row_2_force_works_whatever_is_there(project, there):
    """cookiecutter #1176: no error from a file that exists."""
    project.generate()
    fresh = project.module.read_text("utf-8")
    texts = {"edited": fresh + "mine = 1\n", "foreign": "theirs = 1\n", "empty": ""}
    if there is None:
        project.module.unlink()
    elif there in texts:
        write(project.module, texts[there])
    project.generate("--force")
    assert project.module.read_text("utf-8") == fresh


def test_row_3_an_option_that_is_not_declared_is_an_error(project):
    """cookiecutter #571: it is never dropped in silence; the nearest is named."""
    result = project.run("new-layer", "ParallelTiny", "--set", "spilt=rows")
    assert result.exit_code == 2
    assert "Did you mean 'split'?" in result.stderr
    assert not project.module.exists()


@pytest.mark.parametrize("start", ["PACK", "BM", "MZ", "RIFF", "ID3"])
def test_row_4_text_that_begins_like_a_binary_is_never_left_unrendered(project, start):
    """cookiecutter #2205: an error, and no file with a placeholder in it."""
    write(project.template / MODULE_PATH, f"{start} = 1\n{LAYER}")
    result = project.run("new-layer", "ParallelTiny")
    assert result.exit_code == 3
    assert (
        "cookiecutter takes a file that begins like a binary for one" in result.stderr
    )
    assert not project.module.exists()


def test_row_5_what_templates_share_is_found_by_each(project):
    """cookiecutter #2028: one set of partials, seen from every template and folder."""
    write_template(project.templates, "other", _torchshard={"title": "another"})
    for name, template in (("ParallelTiny", "tiny"), ("ParallelElse", "other")):
        assert project.run("new-layer", name, "-t", template).exit_code == 0
    text = (project.root / "zoo" / "parallel_else.py").read_text("utf-8")
    assert "A plain layer." in text


def test_row_6_two_files_for_one_place_are_an_error(project):
    """cookiecutter #1820: not the one that happens to win."""
    path = (
        "{{cookiecutter._out}}/{{cookiecutter._pkg}}/parallel_tiny.{{cookiecutter._py}}"
    )
    write(project.template / path, LAYER)
    result = project.run("new-layer", "ParallelTiny")
    assert result.exit_code == 3
    assert "two files that render to zoo/parallel_tiny.py" in result.stderr


def test_row_7_a_false_answer_is_false(project):
    """cookiecutter #2126: and not the text "False", which is true."""
    project.generate("--set", "bias=false")
    assert "bias = True" not in project.module.read_text("utf-8")
    header = read_header(project.module.read_text("utf-8"))
    assert header.options["bias"] is False


@pytest.mark.parametrize(
    "setting", ["split=diagonal", "bias=perhaps", "width=wide", "width"]
)
def test_row_8_an_answer_is_judged_before_anything_is_rendered(project, setting):
    """cookiecutter #175: one bad answer, one line, nothing written."""
    write(project.template / MODULE_PATH, "{{ nope }}")
    result = project.run("new-layer", "ParallelTiny", "--set", setting)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ")
    assert not project.module.exists()


def test_row_9_every_path_of_a_template_is_one_on_windows():
    """cookiecutter #943: no `|` and no quote in a name."""
    paths = [path.relative_to(ROOT) for path in (ROOT / "templates").rglob("*")]
    names = {part for path in paths for part in path.parts if part != "__pycache__"}
    assert names
    assert [
        name for name in names if not re.fullmatch(r"[\w.{}-]+", name, re.ASCII)
    ] == []


def test_row_10_lines_end_alike_on_every_system(project):
    """cookiecutter #405: a newline, also where the template was checked out with CRLF."""
    for path in project.templates.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    project.generate()
    assert not any(b"\r" in content for content in project.contents().values())
    assert "eol=lf" in (ROOT / ".gitattributes").read_text("utf-8")


def test_row_11_no_code_of_a_template_runs_unless_it_is_trusted(project, tmp_path):
    """cookiecutter #429: nor does any of its Jinja; the bundled ones have no hooks."""
    folder = write_template(project.root / ".torchshard" / "templates", "own")
    mark = tmp_path / "ran"
    call = f"cycler.__init__.__globals__.os.mkdir('{mark}')"
    write(folder / MODULE_PATH, f"{{% set _ = {call} %}}\n{LAYER}")
    result = project.run("new-layer", "ParallelTiny", "-t", "own")
    assert result.exit_code == 4
    assert not mark.exists()
    assert (
        project.run("new-layer", "ParallelTiny", "-t", "own", "--trust").exit_code == 0
    )
    assert mark.is_dir()
    assert list((ROOT / "templates").glob("*/hooks")) == []


def test_row_12_nothing_is_left_in_the_home_folder(project, tmp_path, monkeypatch):
    """briefcase #1857: no replay file, no settings, no cache."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    project.generate()
    project.edit_template()
    project.run("update", "--all")
    project.run("destroy", "ParallelTiny")
    assert list(home.iterdir()) == []


def test_row_13_the_answers_live_in_the_project(project):
    """cookiecutter #1417: in the lock, and in the file itself."""
    project.generate("--set", "split=columns", "--set", "width=9")
    options = {"split": "columns", "bias": True, "width": 9, "remark": "plain"}
    assert read_lock(project.root).find("ParallelTiny").layer.options == options
    assert read_header(project.module.read_text("utf-8")).options == options


def test_row_14_changes_of_a_template_can_be_taken_later(edited):
    """cookiecutter #784: without generating anew, and with the edits kept."""
    edited.edit_template()
    assert edited.run("update", "ParallelTiny").exit_code == 0
    text = edited.module.read_text("utf-8")
    assert "twice = 8\n" in text
    assert '"""My layer."""' in text
    assert text.endswith("mine = 1\n")


def test_row_15_the_difference_is_shown_before_one_has_to_decide(edited, monkeypatch):
    """copier #343: as an answer to the question, and as an option."""
    for arguments in (("new-layer", "ParallelTiny"), ("update", "--all", "--dry-run")):
        edited.edit_template()
        assert "-    doubled = 8\n" in edited.run(*arguments, "--diff").output
    monkeypatch.setattr("torchshard_cli.main.is_interactive", lambda: True)
    shown = edited.run("new-layer", "ParallelTiny", text="d\nq\n").output
    assert "-    doubled = 8\n" in shown


def test_row_16_drift_has_an_exit_code_and_json(edited):
    """copier #401: a check for CI, which asks nothing."""
    assert edited.run("check").exit_code == 0
    edited.edit_template()
    result = edited.run("check", "--json")
    assert result.exit_code == 1
    states = {
        file["path"]: file["state"] for file in json.loads(result.stdout)["files"]
    }
    assert states == {
        "zoo/parallel_tiny.py": "outdated",
        "tests/test_parallel_tiny.py": "outdated",
    }


def test_row_17_a_file_that_fell_behind_is_seen_whatever_the_lock_says(project):
    """epics-containers #232: the content is compared, and an update heals it."""
    project.generate()
    old = project.module.read_bytes()
    project.edit_template()
    project.run("update", "--all")
    project.module.write_bytes(old)
    assert "outdated  zoo/parallel_tiny.py" in project.run("check").output
    assert project.run("update", "--all").exit_code == 0
    assert project.run("check", "--strict").exit_code == 0


def test_row_18_an_old_template_is_never_rendered_again(edited):
    """copier #1170: one that could not be any more, and others that it needed, are gone."""
    shutil.rmtree(edited.templates)
    write_template(edited.templates)
    (edited.template / MODULE_PATH).write_text(
        LAYER.replace('{% import "macros.j2" as macros %}\n', "")
        .replace("{{ macros.title(cookiecutter.remark) }}", "A plain layer.")
        .replace("doubled =", "twice =")
    )
    shutil.rmtree(edited.templates / "_shared")
    (edited.templates / "_shared").mkdir()
    assert edited.run("update", "--all").exit_code == 0
    text = edited.module.read_text("utf-8")
    assert "twice = 8" in text
    assert '"""My layer."""' in text


def test_row_19_a_conflict_leaves_no_file_beside(torn):
    """copier #2386: no `.rej`, no `.orig`; the markers are in the file, exit code 1."""
    before = set(torn.contents())
    assert torn.run("update", "--all").exit_code == 1
    assert set(torn.contents()) == before


def test_row_20_markers_are_those_that_editors_know(torn):
    """copier #1350: git's own, in diff3 style, each at the beginning of a line."""
    torn.run("update", "--all")
    text = torn.module.read_text("utf-8")
    found = re.findall(r"^(<{7} .*|\|{7} .*|={7}|>{7} .*)$", text, re.MULTILINE)
    assert found == [
        "<<<<<<< yours",
        "||||||| generated before",
        "=======",
        ">>>>>>> template now",
    ]


def test_row_21_nothing_else_in_the_tree_matters(edited, monkeypatch):
    """copier #2362: git need not be there, nor anything else be clean."""
    write(edited.root / ".git" / "HEAD", "no repository at all\n")
    write(edited.root / "zoo" / "other.py", "<<<<<<< HEAD\nbroken(\n")
    monkeypatch.setenv("PATH", "")
    edited.edit_template()
    assert edited.run("update", "--all").exit_code == 0
    assert "twice = 8" in edited.module.read_text("utf-8")


def test_row_22_a_file_that_two_layers_share_holds_both(project):
    """copier #1738: `__init__.py` is edited in a place of its own, whatever the order."""
    texts = []
    for names in itertools.permutations(["ParallelTiny", "TinyA", "TinyB"]):
        write(project.init, '"""The zoo."""\n')
        for name in names:
            assert project.run("new-layer", name, "--force").exit_code == 0
        texts.append(project.init.read_text("utf-8"))
    assert len(set(texts)) == 1
    assert texts[0].count("import") == 3


def test_row_23_a_conflict_is_exit_code_1_and_the_lock_stays(torn):
    """cruft #47: no "Good work!", and the lock advances for the files written alone."""
    torn.module.write_bytes(torn.module.read_bytes() + b"# \xff\n")  # cannot be merged
    before = read_lock(torn.root).find("ParallelTiny")
    result = torn.run("update", "--all")
    assert (result.exit_code, result.stderr) == (1, "Error: 1 file needs you\n")
    after = read_lock(torn.root).find("ParallelTiny")
    assert after.files["zoo/parallel_tiny.py"] == before.files["zoo/parallel_tiny.py"]
    assert after.template_hash == before.template_hash
    test = "tests/test_parallel_tiny.py"
    assert after.files[test].text == torn.test.read_text("utf-8")
    assert after.files[test] != before.files[test]
    assert "outdated  zoo/parallel_tiny.py" in torn.run("check").output


def test_row_24_missing_and_obsolete_files_are_seen_and_mended(project):
    """cruft #256 and #208: by `check`, by `diff` and by `update`."""
    project.generate()
    project.module.unlink()
    project.drop_test()
    shown = project.run("check")
    assert shown.exit_code == 1
    assert "missing   zoo/parallel_tiny.py" in shown.output
    assert "obsolete  tests/test_parallel_tiny.py" in shown.output
    shown = project.run("diff")
    assert shown.exit_code == 1
    assert shown.output.count("+++ /dev/null\n") == 2
    assert project.run("update", "--all").exit_code == 0
    assert project.module.is_file()
    assert not project.test.exists()
    assert project.run("check", "--strict").exit_code == 0


def test_row_25_a_conflict_is_no_larger_than_the_lines_in_question(torn):
    """cruft #287: the rest of the file is merged, not given up whole."""
    edit(torn.module, "A plain", "My")
    torn.run("update", "--all")
    text = torn.module.read_text("utf-8")
    marked = text[text.index("<<<<<<<") : text.index(">>>>>>>")]
    assert marked.count("\n") == 6
    assert '"""My layer."""' in text.replace(marked, "")


def test_row_26_every_template_renders_with_every_choice():
    """transformers #21411: to Python; test_zoo_in_step.py runs the tests of each as well."""
    catalogue = Catalogue(bundled_templates())
    rendered = 0
    for locked in read_lock(ROOT).layers.values():
        for layer in variants(catalogue, locked.layer):
            for text in render_layer(layer, catalogue).values():
                ast.parse(text)
                rendered += 1
    assert rendered > 2 * len(catalogue.names())


def variants(catalogue: Catalogue, layer: Layer):
    """The layer as it is, and with each choice of each option."""
    yield layer
    for option in catalogue.load(layer.template, layer.source).options.values():
        for choice in option.choices or ():
            yield replace(layer, options={**layer.options, option.name: choice})


@pytest.mark.parametrize("name", ["TinyGPT2", "ParallelTinyTiny", "TinyWidthBias"])
def test_row_27_a_name_is_no_search_and_replace(project, name):
    """transformers #14992: a name that holds others, or a digit, changes only its places."""
    project.generate()
    plain = project.module.read_text("utf-8")
    assert project.run("new-layer", name).exit_code == 0
    module = re.search(
        rf"from \.(\w+) import {name}\b", project.init.read_text("utf-8")
    )
    text = (project.root / "zoo" / f"{module[1]}.py").read_text("utf-8")
    body = text[text.index('"""') :]
    assert body == plain[plain.index('"""') :].replace("ParallelTiny", name)


def test_row_28_an_update_touches_what_is_named_and_shows_it_first(project):
    """transformers #36131: no other file is rewritten, outdated or not."""
    project.generate()
    project.run("new-layer", "TinyOther")
    write(project.root / "zoo" / "own.py", "x=1\n")
    project.edit_template()
    before = project.contents()
    plan = project.run("update", "TinyOther", "--dry-run").output
    assert project.contents() == before
    result = project.run("update", "TinyOther")
    assert result.output.splitlines()[:-1] == plan.splitlines()[:-1]
    changed = {
        path for path, text in project.contents().items() if before[path] != text
    }
    shown = set(re.findall(r"\S+\.py", result.output))
    assert changed == {*shown, ".torchshard/lock.json"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# Generated by", "# generated by"),
        ("layer=ParallelTiny", "layer=ParallelTony"),
        ("class ParallelTiny", "@decorated\nclass ParallelTiny"),
        ("width = 5", "width = 5 "),
        ("bias = True\n", "bias = True\n\n"),
        ("bias = True\n", "bias = True"),
    ],
)
def test_row_29_the_whole_file_is_compared(project, old, new):
    """transformers #13583: a line of the header, a decorator, a space, the last newline."""
    project.generate()
    edit(project.module, old, new)
    result = project.run("check", "--strict")
    assert result.exit_code == 1
    assert "edited    zoo/parallel_tiny.py" in result.output


ODD = '''\
if (n := 10) > 5: x = [*range(n)]; y = lambda *, a=1: (yield)
def f(a, /, b, *, c): return f"{a!r:>{b}}" "\\N{BULLET}"  # kept  to the   space
class ParallelTiny2(*()): """Doc."""; z: int = 1
'''


def test_row_30_code_of_the_user_is_text_and_kept_to_the_byte(project):
    """transformers #33900: nothing is parsed and written anew; no class gets lost."""
    project.generate()
    write(project.module, project.module.read_text("utf-8") + ODD)
    project.edit_template()
    assert project.run("update", "--all").exit_code == 0
    assert project.module.read_text("utf-8").endswith(ODD)


def test_row_31_destroy_removes_its_own_files_alone(edited):
    """joosy #19: no folder, no neighbour, and nothing that was edited."""
    write(edited.root / "zoo" / "parallel_tiny_old.py", "mine = 1\n")
    text = edited.module.read_text("utf-8")
    before = edited.contents()
    assert edited.run("destroy", "ParallelTiny").exit_code == 1
    assert edited.module.read_text("utf-8") == text
    assert before.keys() - edited.contents().keys() == {"tests/test_parallel_tiny.py"}
    assert edited.test.parent.is_dir()


def test_row_32_destroy_leaves_nothing_behind(project):
    """devise #632: module, test, export, lock; as if it had never been."""
    before = project.contents()
    project.generate()
    assert project.run("destroy", "ParallelTiny").exit_code == 0
    assert project.contents() == before


def test_row_33_pytest_collects_nothing_of_a_template():
    """cookietemple #101: nor can it take one of their files for a test by its name."""
    names = [path.name for path in (ROOT / "templates").rglob("*") if path.is_file()]
    assert names
    own = "__init__.py"  # makes the folder a package, and is no part of a template
    assert [name for name in names if name.endswith(".py") and name != own] == []
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "templates"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout


def test_row_34_no_compiled_file_of_an_installer_is_copied(project):
    """connectonion #611: `__pycache__` in a template is no part of it."""
    for folder in (project.template, (project.template / MODULE_PATH).parent):
        write(folder / "__pycache__" / "x.cpython-311.pyc", "stray")
    project.generate()
    assert not any("pycache" in path for path in project.contents())


@pytest.mark.parametrize(
    ("way", "answer", "exit_code", "text"),
    [
        ((), None, 1, "yours"),
        (("--skip",), None, 0, "yours"),
        (("--force",), None, 0, "template"),
        (("--merge",), None, 0, "both"),
        ((), "n\n", 0, "yours"),
        ((), "y\n", 0, "template"),
        ((), "m\n", 0, "both"),
        ((), "a\n", 0, "template"),
        ((), "q\n", 1, "yours"),
        ((), "", 0, "yours"),
    ],
)
def test_row_35_each_way_to_settle_a_conflict_has_its_effect(
    edited, monkeypatch, way, answer, exit_code, text
):
    """angular-cli #12118: fail, skip, force, merge, and each answer to the question."""
    is_asked = answer is not None
    monkeypatch.setattr("torchshard_cli.main.is_interactive", lambda: is_asked)
    edited.edit_template()
    result = edited.run("new-layer", "ParallelTiny", *way, text=answer)
    assert result.exit_code == exit_code, result.output
    found = edited.module.read_text("utf-8")
    assert ("mine = 1" in found) == (text in ("yours", "both"))
    assert ("twice = 8" in found) == (text in ("template", "both"))


def test_row_36_the_command_runs_from_anywhere(tmp_path):
    """hatch #1627, setuptools #4943: however it is installed here; test_packaging.py builds
    a wheel as well.
    """
    command = [sys.executable, "-m", "torchshard_cli", "new-layer", "ParallelEmbedding"]
    environment = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, env=environment
    )
    assert (tmp_path / "parallel_embedding.py").is_file()
