"""Pieces of generated text, laid out as ruff would."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .sample import Sample

WIDTH = 88


def wrapped(sentences: Sequence[str]) -> list[str]:
    """The sentences as items of a list in a class's docstring."""
    return [
        line
        for sentence in sentences
        for line in textwrap.wrap(
            f"- {sentence}", WIDTH - 4, subsequent_indent="  ", break_long_words=False
        )
    ]


def formatted(code: str) -> str:
    """`code` as ruff lays it out, where ruff is installed; as it is, otherwise."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "-"]
    result = subprocess.run(command, input=code, capture_output=True, text=True)
    return result.stdout if result.returncode == 0 else code


def method(code: str) -> str:
    """A method of the generated class; `forward` becomes the dense forward."""
    if _shares_a_line(code):
        code = ast.unparse(ast.parse(code)) + "\n"
    code = code.replace("def forward(", "def dense_forward(", 1)
    in_class = formatted(f"class A:\n{textwrap.indent(code, '    ')}")
    return in_class.partition("\n")[2].strip("\n")


def _shares_a_line(code: str) -> bool:
    """Whether the first statement stands behind the colon of the `def`."""
    function = ast.parse(code).body[0]
    assert isinstance(function, ast.FunctionDef)
    first = function.body[0]
    line = code.splitlines()[first.lineno - 1].encode()
    return bool(line[: first.col_offset].strip())


def stub(dense: str, problem: str) -> str:
    """A forward that says what is left to write."""
    words = f"the forward of {dense} was not carried over: {problem}"
    code = (
        "def dense_forward(self, *args: Any, **kwargs: Any) -> Any:\n"
        f'    """To be written: what {dense}.forward computes."""\n'
        f"    raise NotImplementedError({_strings(words)})\n"
    )
    return method(code)


def _strings(words: str) -> str:
    lines = textwrap.wrap(words, 70, drop_whitespace=False)
    quoted = [f'"{line}"' for line in (one.replace('"', "'") for one in lines)]
    return "\n        " + "\n        ".join(quoted) + "\n    "


def case(dense: str, sample: Sample) -> str:
    """One case of the generated test, without the name of the layer."""
    fed = ", ".join(_input(value) for value in sample.inputs)
    rows = [f"args={sample.args!r}"] if sample.args else []
    if sample.options:
        named = ", ".join(
            f'"{name}": {value!r}' for name, value in sample.options.items()
        )
        rows.append(f"options={{{named}}}")
    rows.append(f"inputs=[{fed}]")
    return ",\n".join(f"        {row}" for row in [dense, *rows]) + ","


def _input(value: Any) -> str:
    kind = type(value).__name__
    if kind == "Floats":
        return f"Floats({value.shape!r})"
    return (
        f"Integers({value.high!r}, {value.shape!r})"
        if kind == "Integers"
        else repr(value)
    )


def import_blocks(lines: Iterable[str], is_local: Callable[[str], bool]) -> list[str]:
    """Imports in isort's order: the standard library, what is installed, what is here."""
    blocks: list[list[str]] = [[], [], [], []]
    for line in joined(lines):
        module = line.split()[1]
        top = module.partition(".")[0]
        place = 1 if top in sys.stdlib_module_names else 3 if is_local(module) else 2
        blocks[0 if top == "__future__" else place].append(line)
    return ["\n".join(block) for block in blocks if block]


def joined(lines: Iterable[str]) -> list[str]:
    """One `from` import to a module, sorted: plain imports first, names in isort's order."""
    plain: list[str] = []
    names: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("import "):
            plain.append(line)
        else:
            module, _, name = line.removeprefix("from ").partition(" import ")
            names.setdefault(module, []).append(name)
    found = sorted(set(plain), key=str.lower)
    for module in sorted(names, key=str.lower):
        listed = sorted(set(names[module]), key=_member_key)
        line = f"from {module} import {', '.join(listed)}"
        if len(line) > WIDTH:
            rows = "".join(f"    {name},\n" for name in listed)
            line = f"from {module} import (\n{rows})"  # as isort breaks it
        found.append(line)
    return found


def _member_key(name: str) -> tuple[int, str]:
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return (kind, name.lower())
