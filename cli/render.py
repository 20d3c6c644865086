"""Rendering, in memory: a layer in, the text of its files out. The only cookiecutter.

cookiecutter writes into a temporary folder, never into a project: half-way through an
error it leaves files behind. It is handed the context, so that neither the user's
`~/.cookiecutterrc` nor a replay file can change or follow from a result.
"""

import ast
import os
import shutil
import tempfile
import traceback
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from .errors import TemplateError
from .header import add_header
from .layer import Layer
from .template import SHARED, Template, load_template


def render_layer(layer: Layer, templates_root: Path) -> dict[str, str]:
    """The text of every file of `layer`, by posix path relative to the project's root.

    A pure function of the layer and of the templates: it writes nothing that stays.

    Raises:
        UsageError: If the template does not exist or a value is none of its choices.
        TemplateError: If it does not render, or renders to something unusable.
    """
    template = load_template(templates_root, layer.template)
    layer = replace(layer, options=template.complete(layer.options))
    with tempfile.TemporaryDirectory(prefix="torchshard-") as name:
        scratch = Path(name).resolve()
        stage = _stage(template, scratch / "stage")
        _generate(template, layer, stage, scratch / "out")
        bodies = _read(template, scratch / "out")
    content_hash = template.content_hash()
    return {
        path: add_header(body, layer, content_hash) for path, body in bodies.items()
    }


def _stage(template: Template, stage: Path) -> Path:
    """A copy of the template, with the shared partials where cookiecutter looks for them."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(template.folder, stage, ignore=ignore)
    shared = template.folder.parent / SHARED
    shutil.copytree(shared, stage / "templates", ignore=ignore, dirs_exist_ok=True)
    return stage


def _generate(template: Template, layer: Layer, stage: Path, out: Path) -> None:
    from cookiecutter.generate import generate_files

    try:
        generate_files(
            repo_dir=stage,
            context={"cookiecutter": _context(template, layer, stage)},
            output_dir=out,
            overwrite_if_exists=True,
            accept_hooks=False,
        )
    except TemplateError:
        raise
    except Exception as error:  # a template can run any expression
        raise TemplateError(_describe(error, template, stage)) from error


def _context(template: Template, layer: Layer, stage: Path) -> dict[str, Any]:
    """What a template sees as `cookiecutter`: typed options, then what is computed."""
    from cookiecutter.generate import generate_context

    from .snake import SnakeExtension

    raw = generate_context(str(stage / "cookiecutter.json"))["cookiecutter"]
    extension = f"{SnakeExtension.__module__}.{SnakeExtension.__qualname__}"
    given = {
        **layer.options,
        "class_name": layer.class_name,
        "__module": layer.module,
        "_extensions": [extension],
        "_import": layer.import_path,
        "_new_lines": "\n",
        "_out": ".",
        "_pkg": layer.package,
        "_py": "py",
        "_tests": layer.tests,
    }
    private = {key: raw[key] for key in raw if key.startswith("_")}
    return _computed(template, {**private, **given}, keep=given)


def _computed(
    template: Template, values: dict[str, Any], keep: Container[str]
) -> dict[str, Any]:
    """`values`, where those named `__...` are rendered, save the ones in `keep`."""
    from cookiecutter.prompt import render_variable
    from cookiecutter.utils import create_env_with_context

    environment = create_env_with_context({"cookiecutter": values})
    for key in [key for key in values if key.startswith("__") and key not in keep]:
        try:
            values[key] = render_variable(environment, values[key], values)
        except Exception as error:  # a template can run any expression
            where = f"{_label(template)}/cookiecutter.json: '{key}'"
            raise TemplateError(f"{where}: {_reason(error)}") from error
    return values


def _describe(error: Exception, template: Template, stage: Path) -> str:
    """The file and the line of a template that failed, and why."""
    from jinja2 import TemplateSyntaxError

    cause = error.__cause__ or error
    name, line = _last_template_line(cause)
    if isinstance(cause, TemplateSyntaxError):
        name, line = cause.filename or cause.name or "", cause.lineno
    where = f"{_shown(name, template, stage)}:{line}" if name else _label(template)
    return f"{where}: {_reason(cause)}"


def _label(template: Template) -> str:
    """The folder of a template as its author calls it: `templates/linear`."""
    return f"{template.folder.parent.name}/{template.name}"


def _reason(error: BaseException) -> str:
    return getattr(error, "message", None) or str(error) or type(error).__name__


def _last_template_line(error: BaseException) -> tuple[str, int]:
    """Where the innermost frame that belongs to a template is."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        (frame.filename, frame.lineno or 0)
        for frame in frames
        if not os.path.isabs(frame.filename) and not frame.filename.startswith("<")
    ]
    return ours[-1] if ours else ("", 0)


def _shown(name: str, template: Template, stage: Path) -> str:
    """`name`, which cookiecutter sees from inside the staged folder, as its author does."""
    if name.startswith("../templates/"):
        partial = name.removeprefix("../templates/")
        return f"{template.folder.parent.name}/{SHARED}/{partial}"
    output = next(
        path.name for path in stage.iterdir() if "cookiecutter._out" in path.name
    )
    return f"{_label(template)}/{output}/{name.removeprefix('./')}"


def _read(template: Template, out: Path) -> dict[str, str]:
    found = (path for path in out.rglob("*") if path.is_file())
    paths = sorted(found, key=lambda path: (path.name.startswith("test_"), path))
    if len(paths) != len(template.outputs()):
        raise TemplateError(
            f"template '{template.name}' has {len(template.outputs())} files but wrote "
            f"{len(paths)}; two of its paths render to the same one"
        )
    bodies = {
        path.relative_to(out).as_posix(): path.read_text("utf-8") for path in paths
    }
    for path, body in bodies.items():
        _check_body(template, path, body)
    return bodies


def _check_body(template: Template, path: str, body: str) -> None:
    """Refuse text that Python cannot read or that cookiecutter took for a binary."""
    if "{{ cookiecutter" in body:
        raise TemplateError(
            f"template '{template.name}' left {path} unrendered; "
            "cookiecutter takes a file that begins like a binary for one"
        )
    if not path.endswith(".py"):
        return
    try:
        ast.parse(body)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise TemplateError(
            f"template '{template.name}' rendered {path} to invalid Python, "
            f"line {error.lineno}: {error.msg}: {line}"
        ) from error
