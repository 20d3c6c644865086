"""A throw-away project and a throw-away template, for the tests of the command line.

The template here is the smallest that uses everything a template may: a choice, a boolean,
an integer, a text, a computed value and a shared partial.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torchshard_cli.main import main
from torchshard_cli.project.layer import Layer
from torchshard_cli.template.catalogue import Catalogue
from torchshard_cli.template.render import render_template

FIELDS = {
    "class_name": "ParallelTiny",
    "split": ["rows", "columns"],
    "bias": True,
    "width": 4,
    "remark": "plain",
    "__doubled": "{{ cookiecutter.width * 2 }}",
    "_out": ".",
    "__layer": "{{ cookiecutter.class_name | snake }}.py",
    "__test": "test_{{ cookiecutter.class_name | snake }}.py",
    "_import": "parallel_tiny",
    "_extensions": ["torchshard_cli.snake.SnakeExtension"],
    "_jinja2_env_vars": {"trim_blocks": True, "lstrip_blocks": True},
    "_new_lines": "\n",
    "_torchshard": {
        "title": "a tiny layer",
        "names": ["*Tiny*"],
        "options": {"split": {"help": "what each rank holds"}},
    },
}
LAYER = '''\
{% import "macros.j2" as macros %}
"""{{ cookiecutter.class_name }}, by {{ cookiecutter.split }}."""


class {{ cookiecutter.class_name }}:
    """{{ macros.title(cookiecutter.remark) }}"""

    width = {{ cookiecutter.width + 1 }}
    doubled = {{ cookiecutter.__doubled }}
{% if cookiecutter.bias %}
    bias = True
{% endif %}
'''
TEST = '''\
"""The generated layer has the width it was given."""

from {{ cookiecutter._import }} import {{ cookiecutter.class_name }}


def test_width():
    assert {{ cookiecutter.class_name }}.width == {{ cookiecutter.width + 1 }}
'''
MACROS = "{% macro title(remark) %}A {{ remark }} layer.{% endmacro %}\n"
MODULE_PATH = "{{cookiecutter._out}}/{{cookiecutter.__layer}}"
TEST_PATH = "{{cookiecutter._out}}/{{cookiecutter.__test}}"


def write(path: Path, text: str) -> Path:
    """Write `text` to `path`, its folders made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def add_line(path: Path, line: str = "mine = 1") -> None:
    """Add a line at the end of the file at `path`, as a user does."""
    write(path, path.read_text("utf-8") + f"{line}\n")


def edit(path: Path, old: str, new: str) -> None:
    """Replace `old`, which must be there, in the file at `path`."""
    text = path.read_text("utf-8")
    assert old in text
    write(path, text.replace(old, new))


def write_template(root: Path, name: str = "tiny", **fields: object) -> Path:
    """A template that renders, with `fields` in place of its own; returns its folder."""
    folder = root / name
    write(folder / "cookiecutter.json", json.dumps({**FIELDS, **fields}, indent=2))
    write(folder / MODULE_PATH, LAYER)
    write(folder / TEST_PATH, TEST)
    write(root / "_shared" / "macros.j2", MACROS)
    return folder


def render_layer(layer: Layer, templates: Catalogue) -> dict[str, str]:
    """The text of every file of `layer`, by its template's name."""
    return render_template(templates.load(layer.template, layer.source), layer)


class Project:
    """A project in `folder`: a package `zoo`, a folder `tests`, and templates apart."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.templates = folder / "templates"
        self.template = write_template(self.templates)
        self.init = write(self.root / "zoo" / "__init__.py", '"""The zoo."""\n')
        self.module = self.root / "zoo" / "parallel_tiny.py"
        self.test = self.root / "tests" / "test_parallel_tiny.py"
        self.lock = self.root / ".torchshard" / "lock.json"
        self.test.parent.mkdir()

    def run(
        self, *arguments: str, into: str = "zoo", text: str | None = None
    ) -> Result:
        """Run the command line in the project's root, into the package if it generates."""
        if arguments[0] == "new-layer":
            arguments = (*arguments, "--into", into)
        with working_in(self.root):
            return CliRunner().invoke(main, arguments, input=text, obj=self.templates)

    def generate(self, *arguments: str, into: str = "zoo") -> None:
        """Generate `ParallelTiny`, which must work."""
        result = self.run("new-layer", "ParallelTiny", *arguments, into=into)
        assert result.exit_code == 0, result.output

    def edit_template(self, old: str = "doubled =", new: str = "twice =") -> None:
        """Change the template's layer."""
        path = self.template / MODULE_PATH
        write(path, path.read_text("utf-8").replace(old, new))

    def drop_test(self) -> None:
        """The template stops writing a test."""
        (self.template / TEST_PATH).unlink()

    def contents(self) -> dict[str, bytes]:
        """Every file under the root, with its content."""
        return contents(self.root)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under `folder`, with its content."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Make `folder` the working directory for a while."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def in_here(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, whose ranks start at once, as if in one of its own."""
    path, modules = sys.path.copy(), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sys.path.insert(0, str(folder))  # as `python -m` does
        try:
            result = CliRunner().invoke(main, args)
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                file = getattr(sys.modules[name], "__file__", None) or ""
                if file.startswith(str(folder)):
                    del sys.modules[name]
    return subprocess.CompletedProcess(
        args, result.exit_code, result.stdout, result.stderr
    )
