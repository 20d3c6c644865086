"""Templates: their description, their options, and what is said when one is broken."""

import json
import os
import shutil
import stat

import pytest
from cli_project import (
    FIELDS,
    LAYER,
    MODULE_PATH,
    TEST_PATH,
    Project,
    render_layer,
    write,
    write_template,
)
from click.testing import CliRunner
from cookiecutter.generate import generate_files
from cookiecutter.prompt import prompt_for_config
from torchshard_cli.errors import TemplateError
from torchshard_cli.main import main
from torchshard_cli.project.layer import Layer
from torchshard_cli.template.catalogue import Catalogue

OUTPUT = "templates/tiny/" + MODULE_PATH


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def tiny(**options):
    """The tiny layer in the package `zoo`."""
    return Layer(
        class_name="ParallelTiny",
        template="tiny",
        options=options,
        module="parallel_tiny",
        package="zoo",
        tests="tests",
        import_path="zoo.parallel_tiny",
    )


def test_list_shows_a_line_for_each_template(project):
    """Name, title and origin, in the order of the alphabet; partials are none."""
    write_template(project.templates, "another", _torchshard={"title": "one more"})
    result = project.run("templates", "list")
    assert result.output == (
        "another  one more      bundled\ntiny     a tiny layer  bundled\n"
    )


def test_show_says_all_that_an_author_of_a_layer_needs(project):
    """Options with kind, default and help, names, files in and out, a command."""
    result = project.run("templates", "show", "tiny")
    assert result.output == (
        "tiny: a tiny layer\n"
        "  class_name  str                     (from the command line)\n"
        "  split       rows | columns  [rows]  what each rank holds\n"
        "  bias        bool  [true]\n"
        "  width       int  [4]\n"
        "  remark      str  [plain]\n"
        "fits:        *Tiny*\n"
        "writes:      {package}/{module}.py, {tests}/test_{module}.py\n"
        "comes from:  bundled\n"
        "made of:     cookiecutter.json, module.py, test_module.py, macros.j2\n"
        "example:     torchshard new-layer ParallelTiny -t tiny --set split=columns\n"
    )


def test_descriptions_come_as_json_too(project):
    """`--json` of list is the list of what `--json` of show gives, but for the splits."""
    listed = json.loads(project.run("templates", "list", "--json").stdout)
    shown = json.loads(project.run("templates", "show", "tiny", "--json").stdout)
    assert shown.pop("splits") == []
    assert listed == [shown]
    assert shown["options"][0] == {
        "name": "split",
        "default": "rows",
        "choices": ["rows", "columns"],
        "help": "what each rank holds",
    }


def test_show_says_how_the_layer_can_be_divided(tmp_path, monkeypatch):
    """As the class of the finished layer says it, as text and as JSON."""
    monkeypatch.chdir(tmp_path)
    text = CliRunner().invoke(main, ["templates", "show", "linear"]).output
    assert (
        "divides:     column (dim=1 or dim=-1): the output features\n"
        "             row (dim=0): the input features\n"
    ) in text
    shown = CliRunner().invoke(main, ["templates", "show", "attention", "--json"])
    assert json.loads(shown.output)["splits"] == [
        {"name": "heads", "dims": [], "divides": "the heads"}
    ]


@pytest.mark.parametrize("template", ["cross_entropy", "linear_cross_entropy"])
def test_show_says_how_a_loss_is_divided(template, tmp_path, monkeypatch):
    """Its classes are, always: it has no `dim`."""
    monkeypatch.chdir(tmp_path)
    text = CliRunner().invoke(main, ["templates", "show", template]).output
    assert "divides:     classes: the classes\n" in text


def test_show_of_an_unknown_template_is_a_usage_error(project):
    """Exit code 2, with the nearest name."""
    result = project.run("templates", "show", "tinny")
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: no template 'tinny'. Did you mean 'tiny'?"
        "  (see: torchshard templates list)\n"
    )


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "widht=3",
            "template 'tiny' has no option 'widht'. Did you mean 'width'?"
            "  (see: torchshard templates show tiny)",
        ),
        ("split=row", "split=row is not one of rows, columns. Did you mean 'rows'?"),
        ("split=", "split= is not one of rows, columns."),
        ("bias=perhaps", "bias=perhaps is neither true nor false"),
        ("width=wide", "width=wide is not an integer"),
        (
            "remark={{ 7*7 }}",
            "remark='{{ 7*7 }}' holds a control character or a template tag; "
            "plain text is expected",
        ),
        (
            "remark=a\nb",
            "remark='a\\nb' holds a control character or a template tag; "
            "plain text is expected",
        ),
        (
            "class_name=ParallelOther",
            "class_name is no option; it is the NAME given on the command line:"
            " torchshard new-layer NAME",
        ),
        ("width", "--set width is not of the form key=value"),
    ],
)
def test_a_bad_option_is_refused(project, setting, message):
    """Exit code 2, the whole message, and nothing written."""
    before = project.contents()
    result = project.run("new-layer", "ParallelTiny", "--set", setting)
    assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")
    assert project.contents() == before


def test_an_option_given_twice_is_refused(project):
    """Neither of the two values wins silently."""
    words = ["--set", "width=1", "--set", "width=2"]
    result = project.run("new-layer", "ParallelTiny", *words)
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: --set width is given twice\n",
    )


def test_options_reach_the_template_with_their_types(project):
    """An integer adds, a boolean switches, a text with `=` stays whole."""
    settings = ["split=columns", "width=7", "bias=no", "remark=a=b"]
    project.generate(*[word for one in settings for word in ("--set", one)])
    text = project.module.read_text("utf-8")
    assert "by columns" in text
    assert "width = 8\n" in text
    assert "doubled = 14\n" in text
    assert "bias = True" not in text
    assert "A a=b layer." in text


def test_rendering_is_repeatable(project, tmp_path, monkeypatch):
    """Neither the user's cookiecutter settings nor the place or time zone matter."""
    expected = render_layer(tiny(), Catalogue(project.templates))
    configuration = write(
        tmp_path / "rc", "default_context: {split: columns, width: 99}\n"
    )
    monkeypatch.setenv("COOKIECUTTER_CONFIG", str(configuration))
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.chdir(tmp_path)
    assert render_layer(tiny(), Catalogue(project.templates)) == expected


def test_line_endings_and_modes_of_a_template_do_not_matter(project):
    """A checkout with CRLF, or read-only, renders the same text and hash."""
    expected = render_layer(tiny(), Catalogue(project.templates))
    path = project.template / MODULE_PATH
    path.write_bytes(LAYER.replace("\n", "\r\n").encode())
    os.chmod(path, 0o444)
    assert render_layer(tiny(), Catalogue(project.templates)) == expected
    project.generate()
    assert project.module.stat().st_mode & stat.S_IWUSR


def test_the_hash_covers_shared_partials_and_nothing_stray(project):
    """A change of a partial changes it; a compiled file beside the template does not."""
    before = Catalogue(project.templates).load("tiny").content_hash()
    write(project.template / "__pycache__" / "x.pyc", "stray")
    assert Catalogue(project.templates).load("tiny").content_hash() == before
    write(project.templates / "_shared" / "macros.j2", "{# other #}")
    assert Catalogue(project.templates).load("tiny").content_hash() != before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{{ nope }}", f"{OUTPUT}:13: 'nope' is undefined"),
        (
            "{% if %}",
            f"{OUTPUT}:13: Expected an expression, got 'end of statement block'",
        ),
        ("{{ 1 / 0 }}", f"{OUTPUT}:13: division by zero"),
        (
            "{% include 'nope.j2' %}",
            f"{OUTPUT}:13: 'nope.j2' not found in search paths: '.', '../templates'",
        ),
        (
            "def broken(:",
            "template 'tiny' rendered zoo/parallel_tiny.py to invalid Python, "
            "line 10: invalid syntax: def broken(:",
        ),
        (
            "{{ '{{' }} cookiecutter.x }}",
            "template 'tiny' left zoo/parallel_tiny.py unrendered; "
            "cookiecutter takes a file that begins like a binary for one",
        ),
    ],
)
def test_a_template_that_does_not_render_names_file_and_line(project, line, message):
    """Exit code 3, and nothing written."""
    write(project.template / MODULE_PATH, LAYER + line + "\n")
    before = project.contents()
    result = project.run("new-layer", "ParallelTiny")
    assert (result.exit_code, result.stderr) == (3, f"Error: {message}\n")
    assert project.contents() == before


def test_an_error_in_a_partial_names_the_partial(project):
    """The author is sent to `_shared`, not to the staged copy."""
    text = "\n{% macro title(remark) %}{{ remark.a.b }}{% endmacro %}\n"
    write(project.templates / "_shared" / "macros.j2", text)
    with pytest.raises(TemplateError) as caught:
        render_layer(tiny(), Catalogue(project.templates))
    expected = "templates/_shared/macros.j2:2: 'str object' has no attribute 'a'"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"__doubled": "{{ nope }}"},
            "templates/tiny/cookiecutter.json: '__doubled': 'nope' is undefined",
        ),
        (
            {"width": {}},
            "templates/tiny/cookiecutter.json: option 'width' is {}; "
            "a list of choices, a boolean, a number or a string is expected",
        ),
    ],
)
def test_a_field_that_cannot_be_used_is_named(project, fields, message):
    """Exit code 3, with the key."""
    write_template(project.templates, **fields)
    result = project.run("new-layer", "ParallelTiny")
    assert (result.exit_code, result.stderr) == (3, f"Error: {message}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"class_name": }', "templates/tiny/cookiecutter.json:2: Expecting value"),
        (
            "[]",
            "templates/tiny/cookiecutter.json: an object with a 'class_name' is expected",
        ),
    ],
)
def test_a_broken_cookiecutter_json_is_named(project, text, message):
    """Exit code 3, with the line where there is one."""
    write(project.template / "cookiecutter.json", text)
    result = project.run("templates", "list")
    assert (result.exit_code, result.stderr) == (3, f"Error: {message}\n")


def test_a_template_without_an_output_folder_is_refused(project):
    """cookiecutter's own reason is passed on."""
    for path in sorted(project.template.rglob("*{{*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    result = project.run("new-layer", "ParallelTiny")
    message = "Error: templates/tiny: NonTemplatedInputDirException\n"
    assert (result.exit_code, result.stderr) == (3, message)


@pytest.mark.parametrize("name", ["{{cookiecutter.remark}}", "a|b", "a..b"])
def test_a_path_that_could_escape_is_refused(project, name):
    """Only checked variables may stand in the path of a template's file."""
    write(project.template / "{{cookiecutter._out}}" / name, "")
    result = project.run("new-layer", "ParallelTiny")
    assert (result.exit_code, result.stderr) == (
        3,
        f"Error: templates/tiny/{{{{cookiecutter._out}}}}/{name}: a template's path may hold "
        "letters, digits and the variables _out, _pkg, _tests, __module, _py of "
        "cookiecutter\n",
    )


def test_a_template_brings_no_code_of_its_own(project):
    """The one extension that it gets is ours, whatever it lists."""
    write_template(project.templates, _extensions=["nowhere.Extension"])
    project.generate()


def test_two_files_for_one_path_are_refused(project):
    """What would overwrite what is not left to chance."""
    write(project.template / "{{cookiecutter._out}}/zoo/parallel_tiny.py", "x = 1\n")
    result = project.run("new-layer", "ParallelTiny")
    message = (
        "Error: template 'tiny' has two files that render to zoo/parallel_tiny.py\n"
    )
    assert (result.exit_code, result.stderr) == (3, message)


def test_the_template_is_one_that_cookiecutter_itself_renders(project, tmp_path):
    """With the partials beside it, the same folder works with plain cookiecutter.

    Which makes a text of every number, so the sums are left out.
    """
    for path in (MODULE_PATH, TEST_PATH):
        text = (project.template / path).read_text("utf-8").replace(" + 1", "")
        write(project.template / path, text)
    shutil.copytree(project.templates / "_shared", project.template / "templates")
    fields = prompt_for_config({"cookiecutter": dict(FIELDS)}, no_input=True)
    out = tmp_path / "out"
    generate_files(
        project.template, {"cookiecutter": fields}, out, overwrite_if_exists=True
    )
    assert (out / "layer_zoo" / "parallel_tiny.py").is_file()
