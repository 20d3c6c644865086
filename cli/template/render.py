"""Rendering, in memory: a layer in, the text of its files out. The only cookiecutter.

cookiecutter writes into a temporary folder, never into a project: half-way through an
error it leaves files behind. It is handed the context, so that neither the user's
`~/.cookiecutterrc` nor a replay file can change or follow from a result.
"""

import ast
import os
import posixpath
import tempfile
import traceback
from collections.abc import Container, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import TemplateError
from ..project.header import add_header
from ..project.layer import Layer
from .hooks import running_hooks
from .template import Template
from .template_files import FIELDS, TemplateFile, path_values
from .trust import require_trust


def render_template(template: Template, layer: Layer) -> dict[str, str]:
    """The text of every file of `layer`, by posix path relative to the project's root.

    A pure function of the layer and of the template: it writes nothing that stays. This is
    the one place where the code of a template runs.

    Raises:
        UsageError: If a value is none of the template's choices.
        TemplateError: If it does not render, or renders to something unusable.
        UntrustedError: If it is not bundled, and nobody said that it may run.
    """
    require_trust(template)
    layer = replace(layer, options=template.complete(layer.options))
    with tempfile.TemporaryDirectory(prefix="torchshard-") as name:
        scratch = Path(name).resolve()
        outputs = template.outputs(layer.package, layer.tests, layer.module)
        _stage(template, scratch / "stage")
        _make_folders(scratch / "out", outputs)
        _generate(template, layer, scratch / "stage", scratch / "out")
        bodies = _read(template, outputs, scratch / "out")
    content_hash = template.content_hash()
    return {
        path: add_header(body, layer, content_hash) for path, body in bodies.items()
    }


def _stage(template: Template, stage: Path) -> None:
    """Write the files of the template to `stage`, where cookiecutter looks for them."""
    for name, file in template.files.items():
        _check_text(file)
        path = stage / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)


def _check_text(file: TemplateFile) -> None:
    try:
        file.content.decode()
    except UnicodeDecodeError as error:
        raise TemplateError(f"{file.label}: not UTF-8 text") from error


def _make_folders(out: Path, outputs: Iterable[str]) -> None:
    """Make the folders of `outputs`: cookiecutter makes none that a file's name holds."""
    for path in outputs:
        (out / path).parent.mkdir(parents=True, exist_ok=True)


def _generate(template: Template, layer: Layer, stage: Path, out: Path) -> None:
    from cookiecutter.generate import generate_files

    try:
        with running_hooks(stage.parent) if template.has_hooks else nullcontext():
            generate_files(
                repo_dir=stage,
                context={"cookiecutter": _context(template, layer, stage)},
                output_dir=out,
                overwrite_if_exists=True,
                accept_hooks=template.has_hooks,
            )
    except TemplateError:
        raise
    except Exception as error:  # a template can run any expression
        raise TemplateError(_describe(error, template)) from error


def _context(template: Template, layer: Layer, stage: Path) -> dict[str, Any]:
    """What a template sees as `cookiecutter`: typed options, then what is computed."""
    from cookiecutter.generate import generate_context

    from ..snake import SnakeExtension

    raw = generate_context(str(stage / FIELDS))["cookiecutter"]
    extension = f"{SnakeExtension.__module__}.{SnakeExtension.__qualname__}"
    given: dict[str, Any] = {
        **layer.options,
        **_given_paths(template, layer),
        "class_name": layer.class_name,
        "_extensions": [extension],
        "_import": layer.import_path,
        "_new_lines": "\n",
    }
    if layer.reading:
        given["_reading"] = layer.reading
    private = {key: raw[key] for key in raw if key.startswith("_")}
    return _computed(template, {**private, **given}, keep=given)


def _given_paths(template: Template, layer: Layer) -> dict[str, str]:
    """The variables of the paths of `layer`.

    A template whose paths are made of the parts may have a `__layer` or `__test` of its own.
    """
    values = path_values(layer.package, layer.tests, layer.module)
    paths = " ".join(template.files)
    for whole in ("__layer", "__test"):
        if f"cookiecutter.{whole}" not in paths:
            del values[whole]
    return values


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
            where = template.files[FIELDS].label
            raise TemplateError(f"{where}: '{key}': {_reason(error)}") from error
    return values


def _describe(error: Exception, template: Template) -> str:
    """The file and the line of a template that failed, and why."""
    from jinja2 import TemplateSyntaxError

    cause = error.__cause__ or error
    name, line = _last_template_line(cause)
    if isinstance(cause, TemplateSyntaxError):
        name, line = cause.filename or cause.name or "", cause.lineno
    where = f"{_shown(name, template)}:{line}" if name else template.label
    return f"{where}: {_reason(cause)}"


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


def _shown(name: str, template: Template) -> str:
    """`name`, which cookiecutter sees from inside the staged folder, as its author does."""
    output = next(path for path in template.files if path.startswith("{{"))
    path = posixpath.normpath(posixpath.join(output.partition("/")[0], name))
    return template.files[path].label if path in template.files else path


def _read(template: Template, outputs: list[str], out: Path) -> dict[str, str]:
    paths = [path for path in out.rglob("*") if path.is_file()]
    if not template.has_hooks:
        _check_outputs(template, outputs, len(paths))
    bodies = {
        path.relative_to(out).as_posix(): _read_body(template, path)
        for path in sorted(paths, key=lambda path: (_is_test(path), path))
        if "__pycache__" not in path.parts
    }
    for path, body in bodies.items():
        _check_body(template, path, body)
    return bodies


def _is_test(path: Path) -> bool:
    return path.name.startswith("test_")


def _check_outputs(template: Template, outputs: list[str], count: int) -> None:
    """Refuse two files for one path, of which one would be lost."""
    twice = sorted({path for path in outputs if outputs.count(path) > 1})
    if twice:
        raise TemplateError(
            f"template '{template.name}' has two files that render to {twice[0]}"
        )
    if count != len(outputs):
        raise TemplateError(
            f"template '{template.name}' has {len(outputs)} files but wrote {count}"
        )


def _read_body(template: Template, path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(
            f"template '{template.name}' wrote {path.name}, which is not UTF-8 text"
        ) from error


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
