"""Trying a template: every choice rendered into a scratch folder, read, linted and tested.

tests/layer_zoo/test_zoo_in_step.py holds the bundled templates to it; `torchshard templates test`
holds any other to the same.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import TemplateError
from ..project.layer import Layer, Value
from .options import value_text
from .render import render_template
from .template import Template

LEFT_OVERS = ("{{", "{%", "cookiecutter")
_RUFF = (
    ("check", "--isolated", "--quiet", "--select", "E4,E7,E9,F,I", "."),
    ("format", "--isolated", "--quiet", "--diff", "."),
)


@dataclass(frozen=True)
class Variant:
    """A layer that a template can make: by its defaults, or with one choice changed."""

    choice: str
    layer: Layer


def variants(
    template: Template,
    class_name: str = "",
    options: Mapping[str, Value] | None = None,
) -> Iterator[Variant]:
    """The default of `template`, then one for every choice that is none of the defaults.

    Args:
        template: The template.
        class_name: The class to generate; its own example unless given.
        options: Values of other options than the one that changes.
    """
    given = template.complete(options or {})
    name = class_name or template.class_name
    yield Variant("default", _layer(template, name, given, "default"))
    for option in template.options.values():
        for value in option.listed:
            if value != option.default:
                choice = f"{option.name}={value_text(value)}"
                changed = {**given, option.name: value}
                yield Variant(choice, _layer(template, name, changed, choice))


def _layer(
    template: Template, class_name: str, options: Mapping[str, Value], choice: str
) -> Layer:
    module = re.sub(r"\W+", "_", f"{template.name}_{choice}").lower()
    return Layer(
        class_name=class_name,
        template=template.name,
        options=options,
        module=module,
        package=".",
        tests=".",
        import_path=module,
        source=template.source,
    )


@dataclass
class Outcome:
    """What came of one variant.

    Attributes:
        choice: Which it was.
        files: How many files it has.
        ruff: `clean`, `not clean`, or `not installed`.
        tests: What pytest said of them, in short.
        problems: All that is wrong with it, in full.
        seconds: How long it took.
    """

    choice: str
    files: int = 0
    ruff: str = "-"
    tests: str = "-"
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def try_variant(
    template: Template, variant: Variant, folder: Path, pytest_arguments: Sequence[str]
) -> Outcome:
    """Render `variant` into the empty `folder`, and look at it in every way."""
    outcome = Outcome(variant.choice)
    start = time.monotonic()
    try:
        texts = write_variant(template, variant, folder)
    except TemplateError as error:
        outcome.problems.append(str(error))
        return outcome
    outcome.files = len(texts)
    outcome.problems += [one for path in texts for one in problems(path, texts[path])]
    outcome.ruff, said = run_ruff(folder)
    outcome.problems += said
    outcome.tests, said = run_tests(folder, pytest_arguments)
    outcome.problems += said
    outcome.seconds = time.monotonic() - start
    return outcome


def write_variant(template: Template, variant: Variant, folder: Path) -> dict[str, str]:
    """The texts of `variant` by path, after they were written to `folder`.

    Raises:
        TemplateError: If it does not render, or renders to invalid Python.
    """
    texts = render_template(template, variant.layer)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode())
    return texts


def problems(path: str, text: str) -> Iterator[str]:
    """What is wrong with the generated `text`, as far as reading shows."""
    for left in LEFT_OVERS:
        if left in text:
            line = text[: text.index(left)].count("\n") + 1
            yield f"{path}:{line}: '{left}' is left of the template"
    if text != text.rstrip() + "\n":
        yield f"{path}: ends in other than one newline"


def run_ruff(folder: Path) -> tuple[str, list[str]]:
    """What ruff, by its defaults and not by the settings here, says of `folder`."""
    ruff = _ruff_command()
    if not ruff:
        return "not installed", []
    said = [_failure([*ruff, *arguments], folder) for arguments in _RUFF]
    found = [one for one in said if one]
    return "not clean" if found else "clean", found


def _ruff_command() -> list[str]:
    if importlib.util.find_spec("ruff"):
        return [sys.executable, "-m", "ruff"]
    path = shutil.which("ruff")
    return [path] if path else []


def _failure(command: Sequence[str], folder: Path) -> str:
    """What `command` says if it fails; empty if it does not."""
    done = _run(command, folder)
    return (done.stdout + done.stderr).strip() if done.returncode else ""


def run_tests(folder: Path, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """What pytest says of the tests in `folder`, in short and, if any failed, in full."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = _run([*command, *arguments, "."], folder)
    lines = done.stdout.strip().splitlines()
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", "".join(lines[-1:]))
    if done.returncode == 0:
        return ", ".join(counts), []
    full = (done.stdout + done.stderr).strip()
    if done.returncode == _NO_TESTS:
        return "no tests", ["pytest found no test in what was generated"]
    return ", ".join(counts) or f"pytest ended with {done.returncode}", [full]


_NO_TESTS = 5
"""The exit code of pytest where it collected nothing."""


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, where torchshard is importable as it is here."""
    spec = importlib.util.find_spec("torchshard")
    here = [str(Path(spec.origin).parent.parent)] if spec and spec.origin else []
    paths = [*here, os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
