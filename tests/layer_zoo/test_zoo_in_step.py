"""The zoo is the rendering of the templates, and every template's every choice works."""

import difflib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_project import render_layer
from cookiecutter.generate import generate_context, generate_files
from cookiecutter.prompt import prompt_for_config
from torchshard_cli.naming.names import snake_case
from torchshard_cli.project.header import split_header
from torchshard_cli.project.layer import Layer
from torchshard_cli.project.lock import read_lock
from torchshard_cli.template.catalogue import Catalogue, bundled_templates
from torchshard_cli.template.trial import (
    problems,
    run_ruff,
    run_tests,
    variants,
    write_variant,
)

ROOT = Path(__file__).resolve().parents[2]
ZOO = [locked.layer for locked in read_lock(ROOT).layers.values()]
BUNDLED = Catalogue(bundled_templates())
# `dense` renders what was read of a person's class; tests/cli/test_cli_from_dense.py has those.
TEMPLATES = [name for name in BUNDLED.names() if name != "dense"]


def difference(path: str, rendered: str) -> str:
    """Return what a fresh rendering would change in the file, as a diff."""
    written = (ROOT / path).read_text("utf-8")
    lines = (written.splitlines(keepends=True), rendered.splitlines(keepends=True))
    return "".join(difflib.unified_diff(*lines, path, "its template now"))


def expect_in_step(layer: Layer, templates: Catalogue) -> None:
    for path, rendered in render_layer(layer, templates).items():
        gap = difference(path, rendered)
        assert not gap, f"{gap}\nRun: torchshard update --all"


@pytest.mark.parametrize("layer", ZOO, ids=lambda layer: layer.class_name)
def test_zoo_layer_is_the_rendering_of_its_template(layer: Layer) -> None:
    """Layer and test are byte for byte what the template gives now."""
    expect_in_step(layer, BUNDLED)


def test_every_file_of_the_zoo_is_generated() -> None:
    """No layer in the zoo is written by hand, and each is exported."""
    files = {path.stem for path in (ROOT / "layer_zoo").glob("[a-z]*.py")}
    assert files == {layer.module for layer in ZOO}
    exported = (ROOT / "layer_zoo" / "__init__.py").read_text("utf-8")
    assert all(f"import {layer.class_name}\n" in exported for layer in ZOO)


def test_every_template_has_a_layer_in_the_zoo() -> None:
    """A template that nothing renders would rot."""
    assert {layer.template for layer in ZOO} == set(TEMPLATES)


def template_files(templates: Path, name: str) -> Iterator[Path]:
    yield from (templates / name / "{{cookiecutter._out}}").iterdir()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_changed_line_of_a_template_is_seen(name: str, tmp_path: Path) -> None:
    """One line changed in a template, and its zoo layer is out of step."""
    templates = tmp_path / "templates"
    shutil.copytree(bundled_templates(), templates)
    layer = next(layer for layer in ZOO if layer.template == name)
    expect_in_step(layer, Catalogue(templates))
    for path in template_files(templates, name):
        before = path.read_text("utf-8")
        path.write_text(before.replace("import pytest\n", "import pytest  # changed\n"))
        if path.read_text("utf-8") == before:
            path.write_text(
                before.replace("import torchshard", "import  torchshard", 1)
            )
        with pytest.raises(AssertionError, match="torchshard update --all"):
            expect_in_step(layer, Catalogue(templates))
        path.write_text(before)
    expect_in_step(layer, Catalogue(templates))


@pytest.mark.parametrize("name", TEMPLATES)
def test_cookiecutter_alone_renders_a_bundled_template(
    name: str, tmp_path: Path
) -> None:
    """With the partials beside it, the same folder gives the same layer and test."""
    folder = tmp_path / name
    shutil.copytree(bundled_templates() / name, folder)
    shutil.copytree(bundled_templates() / "_shared", folder / "templates")
    out = tmp_path / "out"
    context = generate_context(str(folder / "cookiecutter.json"))
    fields = prompt_for_config(context, no_input=True)
    generate_files(folder, {"cookiecutter": fields}, out, overwrite_if_exists=True)
    plain = {path.name: path.read_text("utf-8") for path in out.iterdir()}
    template = BUNDLED.load(name)
    module = snake_case(template.class_name)
    layer = Layer(template.class_name, name, {}, module, ".", ".", module)
    ours = render_layer(layer, BUNDLED)
    assert plain == {path: split_header(text)[1][1:] for path, text in ours.items()}


def write_choices(folder: Path) -> int:
    """Write a layer for every choice of a template that the zoo itself does not show."""
    tried = []
    for name in TEMPLATES:
        template = BUNDLED.load(name)
        shown = next(layer for layer in ZOO if layer.template == name)
        tried += [
            write_variant(template, variant, folder)
            for variant in variants(template, shown.class_name, shown.options)
            if variant.choice != "default"
        ]
    for texts in tried:
        assert not [one for path in texts for one in problems(path, texts[path])]
    return len(tried)


@pytest.mark.prove
def test_every_choice_of_every_template_is_clean(tmp_path: Path) -> None:
    """Rendered with each choice, the code passes ruff and mypy."""
    assert write_choices(tmp_path) > len(TEMPLATES)
    assert run_ruff(tmp_path) == ("clean", [])
    mypy = ["mypy", "--strict", "--follow-imports", "silent", "."]
    result = subprocess.run(
        [sys.executable, "-m", *mypy],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "MYPYPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_every_choice_of_every_template_works(tmp_path: Path) -> None:
    """Rendered with each choice, the test of the layer passes.

    By what `torchshard templates test` does, but in one folder, which takes less time, and
    without compiling, which takes most of it: the zoo's own tests do for each template.
    """
    num_choices = write_choices(tmp_path)
    tests, failures = run_tests(tmp_path, ["-W", "error", "-k", "not compiles"])
    assert not failures, failures[0]
    assert int(tests.split()[0]) >= num_choices
