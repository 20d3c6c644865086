"""Templates of the user's own: made, trusted, overridden file by file, fetched, tested."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from cli_project import LAYER, MODULE_PATH, TEST_PATH, Project, write, write_template
from torchshard_cli.project.lock import read_lock
from torchshard_cli.template import new_template, trial
from torchshard_cli.template.catalogue import Catalogue, bundled_templates
from torchshard_cli.template.source import source_name, without_secret

OWN = ".torchshard/templates"
CODE = "{{ cycler.__init__.__globals__.os.mkdir(%r) or '' }}"
"""Jinja that makes a folder: what an unread template could do."""


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHSHARD_TRUST", raising=False)
    return Project(tmp_path)


@pytest.fixture
def mine(project):
    """The project with a template `mine` of its own, made from `tiny`."""
    assert project.run("templates", "new", "mine", "--from", "tiny").exit_code == 0
    return project


def own(project, path):
    return project.root / OWN / path


def stderr_of(project, *arguments, exit_code):
    """The errors of a command that ends so and leaves every file as it was."""
    before = project.contents()
    result = project.run(*arguments)
    assert result.exit_code == exit_code, result.output
    assert project.contents() == before
    return result.stderr


def untrusted(what):
    return (
        f"Error: {what}, and was not run.\n"
        "  A template is code: Jinja can run anything, and hooks are programs. Read it, "
        "then\n"
        "  trust it for this command:  --trust\n"
        "  trust its project for good: export TORCHSHARD_TRUST=/path/of/the/project\n"
    )


class TestNew:
    """`torchshard templates new NAME --from BASE`."""

    def test_a_copy_is_listed_and_generates(self, mine):
        """It has its own title, class and pattern, so that names still lead to one."""
        shown = mine.run("templates", "list").output.splitlines()
        assert [line.split("  ")[0] for line in shown] == ["mine", "tiny"]
        assert shown[0].endswith("  ./.torchshard/templates")
        assert "Made from tiny; say here what it generates" in shown[0]
        result = mine.run("new-layer", "ParallelMine", "--trust")
        assert result.exit_code == 0, result.output
        assert result.output.startswith("template mine   (inferred from the name; ")
        text = (mine.root / "zoo" / "parallel_mine.py").read_text("utf-8")
        assert "class ParallelMine:" in text
        assert mine.run("new-layer", "ParallelTiny").exit_code == 0

    def test_a_copy_holds_all_that_it_imports(self, mine):
        """Partials that it needs come with it, others do not, and a change is its own."""
        write(mine.templates / "_shared" / "other.j2", "{# not imported #}")
        partials = own(mine, "mine/templates")
        assert [path.name for path in partials.iterdir()] == ["macros.j2"]
        template = Catalogue(mine.templates).in_project(mine.root).load("mine")
        before = template.content_hash()
        write(mine.templates / "_shared" / "macros.j2", "{% broken")
        after = Catalogue(mine.templates).in_project(mine.root).load("mine")
        assert after.content_hash() == before
        assert mine.run("new-layer", "ParallelMine", "--trust").exit_code == 0

    def test_partials_of_partials_come_too(self, project):
        """And all of them where the name of one is computed."""
        shared = project.templates / "_shared"
        write(shared / "macros.j2", '{% include "inner.j2" %}')
        write(shared / "inner.j2", "")
        write(shared / "other.j2", "")
        project.run("templates", "new", "mine", "--from", "tiny")
        names = {path.name for path in own(project, "mine/templates").iterdir()}
        assert names == {"macros.j2", "inner.j2"}
        write(shared / "inner.j2", '{% include "ot" ~ "her.j2" %}')
        project.run("templates", "new", "more", "--from", "tiny")
        names = {path.name for path in own(project, "more/templates").iterdir()}
        assert names == {"macros.j2", "inner.j2", "other.j2"}

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "tiny",
                "'tiny' is a bundled template; choose another name, or change single "
                "files of it: torchshard templates override tiny FILE",
            ),
            (
                "mine",
                ".torchshard/templates/mine is there already; choose another name",
            ),
            (
                "../up",
                "'../up' cannot name a template; "
                "a letter is expected, then letters, digits, _ and -",
            ),
            (
                "_shared",
                "'_shared' cannot name a template; "
                "a letter is expected, then letters, digits, _ and -",
            ),
        ],
    )
    def test_a_name_that_is_taken_or_no_name_is_refused(self, mine, name, message):
        """Exit code 2, and nothing written."""
        words = ("templates", "new", name, "--from", "tiny")
        assert stderr_of(mine, *words, exit_code=2) == f"Error: {message}\n"

    def test_a_copy_is_complete_or_not_there(self, project, monkeypatch):
        """Exit code 1 where the file system refuses, and no folder is left."""

        def refuse(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(new_template.os, "rename", refuse)
        result = project.run("templates", "new", "mine", "--from", "tiny")
        assert result.exit_code == 1
        assert result.stderr.endswith("No space left on device; nothing was written\n")
        assert not any(own(project, "").iterdir())

    def test_from_a_subfolder_it_goes_to_the_project(self, mine):
        """The nearest folder above that holds templates is the one."""
        mine.root = mine.root / "zoo"
        assert mine.run("templates", "new", "more", "--from", "tiny").exit_code == 0
        assert (mine.root.parent / OWN / "more" / "cookiecutter.json").is_file()
        assert "mine" in mine.run("templates", "list").output


class TestTrust:
    """A template that is not bundled runs only if the one who runs it says so."""

    def test_row_11_code_of_the_projects_own_template_does_not_run(
        self, mine, tmp_path
    ):
        """Exit code 4, the whole message, and nothing happened."""
        marker = tmp_path / "ran"
        write(own(mine, f"mine/{MODULE_PATH}"), LAYER + CODE % str(marker))
        said = stderr_of(mine, "new-layer", "ParallelMine", exit_code=4)
        assert said == untrusted("template 'mine' comes from ./.torchshard/templates")
        for words in (("templates", "list"), ("templates", "show", "mine")):
            assert mine.run(*words).exit_code == 0
        assert not marker.exists()
        assert mine.run("new-layer", "ParallelMine", "--trust").exit_code == 0
        assert marker.exists()

    def test_the_project_cannot_vouch_for_itself(self, mine):
        """Neither a template's own files nor a lock of trusted runs give trust."""
        assert mine.run("new-layer", "ParallelMine", "--trust").exit_code == 0
        fields = json.loads(own(mine, "mine/cookiecutter.json").read_text("utf-8"))
        fields["_torchshard"] |= {"trusted": True, "is_trusted": True}
        write(own(mine, "mine/cookiecutter.json"), json.dumps(fields))
        stderr_of(mine, "new-layer", "ParallelMine", exit_code=4)
        stderr_of(mine, "update", "--all", exit_code=4)
        stderr_of(mine, "templates", "test", "mine", exit_code=4)

    @pytest.mark.parametrize(
        ("value", "exit_code"),
        [
            ("{root}", 0),
            ("/elsewhere{sep}{root}", 0),
            ("{root}/..", 0),
            ("{root}/zoo", 4),
            ("/elsewhere", 4),
            (".", 4),
            ("", 4),
        ],
    )
    def test_the_environment_names_folders_to_trust(
        self, mine, monkeypatch, value, exit_code
    ):
        """Absolute ones, and what lies in them; a relative one would be any project."""
        value = value.format(root=mine.root, sep=os.pathsep)
        monkeypatch.setenv("TORCHSHARD_TRUST", value)
        assert mine.run("new-layer", "ParallelMine").exit_code == exit_code

    def test_layers_of_other_templates_go_on(self, mine):
        """An own template that is not trusted stops its own layers alone."""
        mine.generate()
        assert mine.run("new-layer", "ParallelMine", "--trust").exit_code == 0
        states = json.loads(mine.run("check", "--json").stdout)["files"]
        assert {(one["layer"], one["state"]) for one in states} == {
            ("zoo.ParallelMine", "untrusted"),
            ("zoo.ParallelTiny", "ok"),
        }
        assert mine.run("check").exit_code == 4
        assert mine.run("check", "--trust").exit_code == 0
        assert mine.run("update", "ParallelTiny").exit_code == 0

    def test_what_is_known_without_the_template_is_still_said(self, mine):
        """A file that is gone is missing, exit code 1, whether or not one trusts."""
        mine.run("new-layer", "ParallelMine", "--trust")
        (mine.root / "zoo" / "parallel_mine.py").unlink()
        result = mine.run("check")
        assert result.exit_code == 1
        assert "missing   zoo/parallel_mine.py\n" in result.output
        assert result.output.endswith("1 missing, 1 untrusted\n")

    def test_a_template_that_is_gone_is_told_apart(self, mine):
        """Exit code 3, and never ok."""
        mine.run("new-layer", "ParallelMine", "--trust")
        shutil.rmtree(own(mine, "mine"))
        result = mine.run("check", "--trust")
        assert result.exit_code == 3
        assert "unavailable  zoo/parallel_mine.py" in result.output
        assert "no template 'mine'." in result.output

    def test_a_suggested_command_keeps_the_trust(self, mine):
        """What a conflict offers to type works as it stands."""
        write(mine.root / "zoo" / "parallel_mine.py", "mine = 1\n")
        result = mine.run("new-layer", "ParallelMine", "--trust")
        assert "ParallelMine --into zoo --trust --diff\n" in result.stderr
        assert (
            mine.run("new-layer", "ParallelMine", "--trust", "--force").exit_code == 0
        )
        write(own(mine, f"mine/{TEST_PATH}"), "x = 1\n")
        shown = mine.run("check", "--trust").output
        assert "run: torchshard update ParallelMine --trust\n" in shown
        assert mine.run("update", "ParallelMine", "--trust").exit_code == 0


class TestOverride:
    """One file of a bundled template, replaced."""

    @pytest.fixture
    def overridden(self, project):
        """The project with a module of its own for `tiny`, and a layer from before."""
        project.generate()
        result = project.run("templates", "override", "tiny", "module.py")
        assert result.exit_code == 0, result.output
        path = own(project, f"tiny/{MODULE_PATH}")
        write(path, path.read_text("utf-8").replace("doubled =", "twice ="))
        return project

    def test_the_file_takes_the_place_of_the_bundled_one(self, overridden):
        """Another text is rendered, the hash is another, the rest is torchshard's."""
        assert overridden.run("check").exit_code == 4
        result = overridden.run("check", "--trust")
        assert result.exit_code == 1
        assert "outdated  zoo/parallel_tiny.py" in result.output
        assert "template changed: +1 -1" in result.output
        assert overridden.run("update", "--all", "--trust").exit_code == 0
        assert "twice = 8\n" in overridden.module.read_text("utf-8")
        assert overridden.run("check", "--trust").exit_code == 0
        overridden.edit_template("class", "# theirs, not seen\nclass")
        assert overridden.run("check", "--trust").exit_code == 0
        write(overridden.template / TEST_PATH, "# theirs, seen\n")
        assert overridden.run("check", "--trust").exit_code == 1

    def test_list_and_show_say_so(self, overridden):
        """By the name that one types for it, and where it is."""
        listed = overridden.run("templates", "list").output
        assert listed == "tiny  a tiny layer  bundled, 1 file overridden\n"
        shown = overridden.run("templates", "show", "tiny").output
        assert f"overridden:  module.py by {OWN}/tiny/{MODULE_PATH}\n" in shown
        assert "not trusted: read its files; --trust lets them run\n" in shown
        fields = json.loads(
            overridden.run("templates", "show", "tiny", "--json").stdout
        )
        assert fields["overridden"] == [MODULE_PATH]
        assert fields["trusted"] is False

    def test_it_is_code_too(self, overridden):
        """Exit code 4 without trust, naming the file."""
        said = stderr_of(overridden, "new-layer", "ParallelTiny", exit_code=4)
        what = "template 'tiny' has files of the project's own (module.py)"
        assert said == untrusted(what)

    def test_a_shared_partial_is_replaced_for_one_template(self, project):
        """The other templates keep the bundled one."""
        write_template(project.templates, "other", _torchshard={"names": ["*Other"]})
        project.run("templates", "override", "tiny", "macros.j2")
        path = own(project, "tiny/templates/macros.j2")
        write(path, "{% macro title(remark) %}Mine.{% endmacro %}")
        project.generate("--trust")
        assert '"""Mine."""' in project.module.read_text("utf-8")
        assert project.run("new-layer", "ParallelOther").exit_code == 0
        text = (project.root / "zoo" / "parallel_other.py").read_text("utf-8")
        assert '"""A plain layer."""' in text

    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("cookiecuter.json", " Did you mean 'cookiecutter.json'?"),
            ("parallel_tiny.py", ""),
            ("hooks/post_gen_project.py", ""),
        ],
    )
    def test_a_file_that_replaces_none_is_an_error(self, project, path, hint):
        """Exit code 3: a misspelt override would change nothing, in silence."""
        write(own(project, f"tiny/{path}"), "")
        said = stderr_of(project, "new-layer", "ParallelTiny", "--trust", exit_code=3)
        assert said == (
            f"Error: {OWN}/tiny/{path} takes the place of no file of the bundled "
            f"template 'tiny'.{hint} For a template with a file more: "
            "torchshard templates new NAME --from tiny\n"
        )

    def test_what_systems_and_editors_leave_is_no_override(self, project):
        """Hidden files and compiled ones do not count."""
        write(own(project, "tiny/.DS_Store"), "")
        write(own(project, "tiny/__pycache__/x.pyc"), "")
        project.generate()

    @pytest.mark.parametrize(
        ("name", "file", "message"),
        [
            (
                "tiny",
                "modul.py",
                "template 'tiny' has no file 'modul.py'. Did you mean 'module.py'? "
                "It has: cookiecutter.json, macros.j2, module.py, test_module.py",
            ),
            (
                "mine",
                "module.py",
                "'mine' is your own template; edit it in .torchshard/templates/mine",
            ),
        ],
    )
    def test_what_cannot_be_overridden_is_refused(self, mine, name, file, message):
        """Exit code 2, with what can be."""
        words = ("templates", "override", name, file)
        assert stderr_of(mine, *words, exit_code=2) == f"Error: {message}\n"

    def test_an_override_is_not_overwritten(self, overridden):
        """The second time it is refused."""
        words = ("templates", "override", "tiny", "module.py")
        said = stderr_of(overridden, *words, exit_code=2)
        expected = f"{OWN}/tiny/{MODULE_PATH} is there already; edit it, or delete it"
        assert said == f"Error: {expected} first\n"


class TestFolder:
    """What lies in `.torchshard/templates`."""

    def test_row_5_partials_are_found_nearest_first(self, mine):
        """The template's own, then the project's, then the bundled; none leaks out."""
        title = "{% macro title(remark) %}"
        own(mine, "mine/templates/macros.j2").unlink()
        render = ("new-layer", "ParallelMine", "--trust", "--force")
        path = mine.root / "zoo" / "parallel_mine.py"
        texts = []
        for place in (None, "_shared/macros.j2", "mine/templates/macros.j2"):
            if place:
                write(own(mine, place), f"{title}{place}{{% endmacro %}}")
            assert mine.run(*render).exit_code == 0
            texts.append(path.read_text("utf-8"))
        assert '"""A plain layer."""' in texts[0]
        assert '"""_shared/macros.j2"""' in texts[1]
        assert '"""mine/templates/macros.j2"""' in texts[2]
        mine.generate()
        assert '"""A plain layer."""' in mine.module.read_text("utf-8")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            (
                "tinny",
                "has no cookiecutter.json, and no bundled template has its name."
                " Did you mean 'tiny'?",
            ),
            ("my own", None),
        ],
    )
    def test_a_folder_that_is_no_template_is_an_error(self, project, name, message):
        """Exit code 3: a misspelt name would be passed over in silence."""
        write(own(project, f"{name}/{MODULE_PATH}"), LAYER)
        said = stderr_of(project, "templates", "list", exit_code=3)
        label = f"Error: {OWN}/{name}"
        rule = "a template's name is a letter, then letters, digits, _ and -"
        assert said == (f"{label} {message}\n" if message else f"{label}: {rule}\n")

    def test_row_6_two_folders_to_render_are_an_error(self, mine):
        """cookiecutter would take whichever the system lists first."""
        write(own(mine, "mine/{{ cookiecutter._out }}/x"), "")
        said = stderr_of(mine, "templates", "show", "mine", exit_code=3)
        assert said == (
            f"Error: {OWN}/mine has several folders to render, "
            "{{ cookiecutter._out }} and {{cookiecutter._out}}; one is expected\n"
        )

    def test_an_error_names_the_file_that_its_author_edits(self, mine):
        """Not the staged copy."""
        write(own(mine, f"mine/{TEST_PATH}"), "\n{{ nope }}\n")
        result = mine.run("new-layer", "ParallelMine", "--trust")
        where = f"{OWN}/mine/{TEST_PATH}:2"
        assert result.stderr == f"Error: {where}: 'nope' is undefined\n"

    def test_a_file_that_is_no_text_is_an_error(self, mine):
        """Exit code 3 and no traceback."""
        path = own(mine, "mine/{{cookiecutter._out}}/picture")
        path.write_bytes(b"\xff\xd8\x00\x01")
        said = stderr_of(mine, "new-layer", "ParallelMine", "--trust", exit_code=3)
        assert said == (
            f"Error: {OWN}/mine/{{{{cookiecutter._out}}}}/picture: not UTF-8 text\n"
        )


LONGER = {
    MODULE_PATH: "{{cookiecutter._out}}/{{cookiecutter._pkg}}/"
    "{{cookiecutter.__module}}.{{cookiecutter._py}}",
    TEST_PATH: "{{cookiecutter._out}}/{{cookiecutter._tests}}/"
    "test_{{cookiecutter.__module}}.{{cookiecutter._py}}",
}
"""Paths made of folders and names, by those that are one variable each."""


class TestLongerPaths:
    """Paths whose folders and names are variables of their own, as they first were."""

    @pytest.fixture
    def longer(self, mine):
        """The project, with the paths of `mine` in that form, and a `__test` of its own."""
        for short, long in LONGER.items():
            text = own(mine, f"mine/{short}").read_text("utf-8")
            own(mine, f"mine/{short}").unlink()
            write(own(mine, f"mine/{long}"), text + "own = {{ cookiecutter.__test }}\n")
        path = own(mine, "mine/cookiecutter.json")
        fields = json.loads(path.read_text("utf-8"))
        del fields["__layer"]
        fields |= {"__module": "x", "_pkg": ".", "_tests": ".", "_py": "py"}
        fields["__test"] = "{{ cookiecutter.width * 3 }}"
        write(path, json.dumps(fields))
        return mine

    def test_they_render_to_the_same_places(self, longer):
        """And a variable of the template's own keeps its value."""
        assert longer.run("new-layer", "ParallelMine", "--trust").exit_code == 0
        for path in ("zoo/parallel_mine.py", "tests/test_parallel_mine.py"):
            text = (longer.root / path).read_text("utf-8")
            assert text.endswith("own = 12\n")
        assert longer.run("check", "--trust").exit_code == 0

    def test_they_have_the_same_short_names(self, longer):
        """Those that `show` lists."""
        shown = longer.run("templates", "show", "mine").output
        assert "writes:      {package}/{module}.py, {tests}/test_{module}.py\n" in shown
        assert ", cookiecutter.json, module.py, test_module.py\n" in shown


HOOK = """\
import json, pathlib
print("hook of {{ cookiecutter.class_name }}")
path = next(pathlib.Path().rglob("parallel_mine.py"))
path.write_text(path.read_text() + "hooked = True\\n")
"""


class TestHooks:
    """Programs of a template around the rendering."""

    def test_row_11_hooks_run_only_where_trusted(self, mine, tmp_path, monkeypatch):
        """They change what is generated; what they print is not mixed into JSON."""
        write(own(mine, "mine/hooks/post_gen_project.py"), HOOK)
        stderr_of(mine, "new-layer", "ParallelMine", exit_code=4)
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        result = mine.run("new-layer", "ParallelMine", "--trust", "--json")
        assert json.loads(result.stdout)["written"] is True
        module = mine.root / "zoo" / "parallel_mine.py"
        assert module.read_text("utf-8").endswith("hooked = True\n")
        assert mine.run("check", "--trust", "--strict").exit_code == 0
        assert not os.listdir(temporary)

    def test_what_a_hook_prints_stays_off_stdout(self, mine):
        """As a real process, where the hook has the same stdout."""
        write(own(mine, "mine/hooks/post_gen_project.py"), HOOK)
        shutil.copytree(own(mine, "mine"), mine.root.parent / "alone")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torchshard_cli", "new-layer", "ParallelMine"),
                *("--json", "--trust"),
                *("-t", "../alone"),
            ],
            cwd=mine.root,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["layer"] == "ParallelMine"
        assert done.stderr == "hook of ParallelMine\n"

    def test_a_hook_that_fails_stops_all(self, mine):
        """Exit code 3, nothing written, no traceback."""
        write(own(mine, "mine/hooks/pre_gen_project.py"), "raise SystemExit(7)")
        said = stderr_of(mine, "new-layer", "ParallelMine", "--trust", exit_code=3)
        assert said.startswith(f"Error: {OWN}/mine: Hook script failed")
        assert "Traceback" not in said


def git(*arguments, cwd):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(
        ["git", *identity, *arguments], cwd=cwd, check=True, capture_output=True
    )


@pytest.fixture
def theirs(mine, tmp_path):
    """A template outside the project, self-contained, with more around it."""
    folder = tmp_path / "theirs"
    shutil.copytree(own(mine, "mine"), folder)
    shutil.rmtree(mine.root / OWN)
    write(folder / "read me.txt", "not of the template")
    write(folder / "tests" / "a|b", "neither")
    return folder


def as_folder(theirs):
    return "../theirs"


def as_zip(theirs):
    parent = theirs.parent
    return shutil.make_archive(str(parent / "theirs-1.0"), "zip", parent, "theirs")


def as_repository(theirs):
    git("init", "-q", cwd=theirs)
    git("add", ".", cwd=theirs)
    git("commit", "-q", "-m", "first", cwd=theirs)
    copy = theirs.parent / "theirs.git"
    git("clone", "-q", "--bare", theirs, copy, cwd=theirs)
    return f"file://{copy}"


class TestFetched:
    """`-t` with a folder, an archive or a repository."""

    @pytest.mark.parametrize("make", [as_folder, as_zip, as_repository])
    def test_row_12_it_is_fetched_rendered_and_gone(
        self, mine, theirs, make, tmp_path, monkeypatch
    ):
        """Trusted it generates, and neither the home folder nor /tmp keeps anything."""
        home = tmp_path / "home"
        home.mkdir(mode=0o500)
        monkeypatch.setenv("HOME", str(home))
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(scratch))
        source = make(theirs)
        said = stderr_of(mine, "new-layer", "ParallelMine", "-t", source, exit_code=4)
        assert " is not one of torchshard's own, and was not run." in said
        result = mine.run("new-layer", "ParallelMine", "-t", source, "--trust")
        assert result.exit_code == 0, result.output
        (locked,) = read_lock(mine.root).layers.values()
        assert locked.layer.template.startswith("theirs")
        assert mine.run("check").exit_code == 4
        assert mine.run("check", "--trust").exit_code == 0
        again = mine.run("new-layer", "ParallelMine", "--trust")
        assert again.output.splitlines()[-1] == "nothing to write"
        assert list(home.iterdir()) == list(scratch.iterdir()) == []

    def test_the_lock_names_a_path_from_the_root(self, mine, theirs):
        """So that a project that moves with its templates still finds them."""
        mine.root, root = mine.root / "zoo", mine.root
        words = ("-t", "../../theirs", "--trust")
        result = mine.run("new-layer", "ParallelMine", *words, into=".")
        assert result.exit_code == 0, result.output
        (locked,) = read_lock(root).layers.values()
        assert locked.layer.source == "../theirs"
        assert mine.run("check", "--trust").exit_code == 0

    def test_a_change_there_is_drift_and_its_end_is_told(self, mine, theirs):
        """Outdated, then unavailable: exit codes 1 and 3."""
        mine.run("new-layer", "ParallelMine", "-t", "../theirs", "--trust")
        write(theirs / TEST_PATH, "# another\n")
        assert mine.run("check", "--trust").exit_code == 1
        shutil.rmtree(theirs)
        result = mine.run("check", "--trust")
        assert result.exit_code == 3
        assert "cannot fetch the template ../theirs: " in result.output

    def test_partials_beside_a_folder_are_found(self, mine, theirs):
        """As for the project's own."""
        shutil.rmtree(theirs / "templates")
        text = "{% macro title(remark) %}Beside.{% endmacro %}"
        write(theirs.parent / "_shared" / "macros.j2", text)
        mine.run("new-layer", "ParallelMine", "-t", "../theirs", "--trust")
        module = mine.root / "zoo" / "parallel_mine.py"
        assert '"""Beside."""' in module.read_text("utf-8")

    def test_it_can_be_read_and_copied_before_it_is_trusted(
        self, mine, theirs, tmp_path
    ):
        """show and new run nothing of it."""
        marker = tmp_path / "ran"
        write(theirs / MODULE_PATH, LAYER + CODE % str(marker))
        source = as_repository(theirs)
        shown = mine.run("templates", "show", source)
        assert f"comes from:  {source}\n" in shown.output
        assert f"-t {source} --set split=columns --trust\n" in shown.output
        result = mine.run("templates", "new", "copy", "--from", source)
        assert result.exit_code == 0, result.output
        assert not own(mine, "copy/.git").exists()
        assert not own(mine, "copy/tests").exists()
        assert not marker.exists()

    def test_a_link_that_leaves_the_template_is_refused(self, mine, theirs, tmp_path):
        """What it points to would be copied into the layer."""
        secret = write(tmp_path / "secret", "mine alone\n")
        (theirs / "templates" / "secret.j2").symlink_to(secret)
        words = ("templates", "new", "copy", "--from", "../theirs")
        said = stderr_of(mine, *words, exit_code=3)
        expected = "../theirs/templates/secret.j2 is a link that leaves the template"
        assert said == f"Error: {expected}\n"
        (theirs / "templates" / "secret.j2").unlink()
        (theirs.parent / "_shared").mkdir()
        (theirs.parent / "_shared" / "secret.j2").symlink_to(secret)
        said = stderr_of(mine, *words, exit_code=3)
        expected = "../_shared/secret.j2 is a link that leaves the template"
        assert said == f"Error: {expected}\n"

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("./no/such", "no template at ./no/such; there is no such file or folder"),
            ("./zoo", "cannot fetch the template ./zoo: "),
            ("./bad.zip", "cannot fetch the template ./bad.zip: "),
            ("file:///no/such.git", "cannot fetch the template file:///no/such.git: "),
        ],
    )
    def test_what_cannot_be_fetched_is_told(self, project, source, message):
        """Exit code 2, one line, no traceback."""
        write(project.root / "bad.zip", "not a zip")
        words = ("new-layer", "ParallelTiny", "-t", source, "--trust")
        said = stderr_of(project, *words, exit_code=2)
        assert said.startswith(f"Error: {message}")
        assert said.count("\n") == 1

    def test_a_token_is_told_to_nobody(self, project):
        """Neither an error nor the lock holds what a URL authenticates with."""
        url = "https://me:s3cret@localhost:1/theirs.git"
        words = ("new-layer", "ParallelTiny", "-t", url)
        for more in ([], ["--trust"]):
            result = project.run(*words, *more)
            assert result.exit_code == (2 if more else 4)
            assert "https://localhost:1/theirs.git" in result.stderr
            assert "s3cret" not in result.output
        assert without_secret(url) == "https://localhost:1/theirs.git"
        assert without_secret("git@host:theirs.git") == "git@host:theirs.git"

    @pytest.mark.parametrize(
        ("source", "name"),
        [
            ("https://example.org/team/my.layers.git", "my-layers"),
            ("git@example.org:theirs.git/", "theirs"),
            ("../a b/", "a-b"),
            ("x/3d.ZIP", "template-3d"),
            ("gh:team/theirs", "theirs"),
        ],
    )
    def test_it_is_called_after_its_source(self, source, name):
        """By one word, as the header of a file holds it."""
        assert source_name(source) == name


def takes_long(*values):
    return pytest.param(*values, marks=pytest.mark.prove)


class TestTest:
    """`torchshard templates test`."""

    def run(self, project, *arguments):
        return project.run("templates", "test", *arguments)

    @pytest.mark.prove
    def test_every_choice_is_rendered_and_tested(self, mine):
        """A row for the default and for each other choice; exit code 0."""
        result = self.run(mine, "mine", "--trust")
        assert result.exit_code == 0, result.output
        rows = [line.split() for line in result.output.splitlines()]
        assert [row[:2] for row in rows[:-1]] == [
            ["template", "choice"],
            ["mine", "default"],
            ["mine", "split=columns"],
            ["mine", "bias=false"],
        ]
        assert all(row[-1] == "ok" for row in rows[1:-1])
        assert all(row[3:6] == ["clean", "1", "passed"] for row in rows[1:-1])
        assert result.output.endswith("3 renderings passed\n")

    @pytest.mark.prove
    def test_without_a_name_all_own_ones_are_tried(self, mine):
        """Also bundled ones with a file of the project's own."""
        mine.run("templates", "override", "tiny", "module.py")
        fields = json.loads(self.run(mine, "--trust", "--json").stdout)
        assert {name: len(found) for name, found in fields.items()} == {
            "mine": 3,
            "tiny": 3,
        }
        assert not any(one["problems"] for found in fields.values() for one in found)

    def test_where_there_are_none_a_name_is_asked_for(self, project):
        """Exit code 2."""
        said = stderr_of(project, "templates", "test", exit_code=2)
        assert said.startswith("Error: this project has no templates of its own; ")

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            takes_long(
                "{% if cookiecutter.bias %}\nx = [1,2]\n{% endif %}", "-x = [1,2]"
            ),
            takes_long("import os", "F401"),
            takes_long("x = '{{ '{{' }}'", ": '{{' is left of the template"),
            ("{{ nope }}", "'nope' is undefined"),
            ("def f(:", "invalid syntax"),
            takes_long("raise ValueError('at import')", "ValueError: at import"),
            takes_long(
                "{% if not cookiecutter.bias %}\nwidth = no\n{% endif %}", "NameError"
            ),
        ],
    )
    def test_what_is_wrong_with_a_rendering_fails(self, mine, line, problem):
        """Exit code 1, the row, and the reason in full."""
        write(own(mine, f"mine/{MODULE_PATH}"), f"{LAYER}{line}\n")
        result = self.run(mine, "mine", "--trust")
        assert result.exit_code == 1
        assert problem in result.stdout
        count = 1 if "bias" in line and "not" in line else 2 if "bias" in line else 3
        assert result.stderr == f"Error: {count} of 3 renderings failed\n"
        assert result.stdout.count("  failed\n") == count

    def test_a_template_without_tests_fails(self, mine):
        """Nothing that ran is no success."""
        write(own(mine, f"mine/{TEST_PATH}"), '"""None."""\n')
        result = self.run(mine, "mine", "--trust")
        assert result.exit_code == 1
        assert "pytest found no test in what was generated" in result.stdout

    @pytest.mark.prove
    def test_what_follows_two_dashes_goes_to_pytest(self, mine):
        """Also without a name before it."""
        for words in (("mine", "--trust"), ("--trust",)):
            result = self.run(mine, *words, "--", "-k", "nothing_like_it")
            assert result.exit_code == 1
            assert "1 deselected" in result.stdout or "no tests" in result.stdout

    @pytest.mark.prove
    def test_without_ruff_the_rest_is_tried_and_it_is_said(self, mine, monkeypatch):
        """No claim is made for what did not run."""
        monkeypatch.setattr(trial, "_ruff_command", list)
        write(own(mine, f"mine/{MODULE_PATH}"), f"{LAYER}x = [1,2]\n")
        result = self.run(mine, "mine", "--trust")
        assert result.exit_code == 0
        assert result.stdout.count("not installed") == 3

    @pytest.mark.prove
    def test_a_folder_anywhere_can_be_tried(self, mine, theirs):
        """By its path, with trust."""
        assert self.run(mine, "../theirs").exit_code == 4
        assert self.run(mine, "../theirs", "--trust").exit_code == 0


def test_the_template_of_dense_classes_is_told_apart(project):
    """It renders what was read, so it can be neither tried nor copied by itself."""
    project.templates = bundled_templates()
    said = stderr_of(project, "templates", "test", "dense", exit_code=2)
    assert "renders what `torchshard new-layer NAME --from MODULE:CLASS` reads" in said
    words = ("templates", "new", "mine", "--from", "dense")
    said = stderr_of(project, *words, exit_code=2)
    assert said.endswith("torchshard templates override dense FILE\n")
    shown = project.run("templates", "show", "dense").output
    assert "torchshard new-layer ParallelDense --from my_model:Layer\n" in shown


def test_a_name_that_lies_here_is_told_from_a_path(project):
    """`-t mine` is a name; the folder of that name is `-t ./mine`."""
    write_template(project.root, "mine")
    said = stderr_of(project, "new-layer", "ParallelTiny", "-t", "mine", exit_code=2)
    assert " The folder here is -t ./mine.  (see:" in said


def test_row_33_and_34_nothing_stray_is_copied(mine):
    """No `.py` in a template for pytest to collect, no compiled file in a copy."""
    write(own(mine, "mine/templates/__pycache__/x.pyc"), "stray")
    write(own(mine, "mine/{{cookiecutter._out}}/__pycache__/x.pyc"), "stray")
    assert mine.run("templates", "new", "copy", "--from", "mine").exit_code == 0
    names = {path.name for path in Path(own(mine, "copy")).rglob("*")}
    assert "__pycache__" not in names
    assert not {name for name in names if name.endswith((".py", ".pyc"))}
    assert mine.run("new-layer", "ParallelCopy", "--trust").exit_code == 0
