"""The constructor of a dense class: its signature as text, and how to pass it on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import UsageError
from .sample import Sample
from .source import free_names, imports_of, method_of


@dataclass(frozen=True)
class Constructor:
    """What is known of a constructor.

    Attributes:
        parameters: Its parameters as text, without `self`; `*` and `/` among them.
        call: The arguments that hand all of them on.
        names: The names that its defaults and annotations use.
        module: Name of the module in which those have their meaning.
        plain: Names of the parameters that are plain arguments.
    """

    parameters: list[str]
    call: list[str]
    names: set[str]
    module: str
    plain: list[str]

    def name_of(self, size: int, sample: Sample) -> str:
        """The parameter that the size comes from, if one has that value alone."""
        given = {**dict(zip(self.plain, sample.args, strict=False)), **sample.options}
        found = [
            name for name, value in given.items() if value == size and value is not True
        ]
        return found[0] if len(found) == 1 else ""


def read_constructor(owner: type[nn.Module]) -> Constructor:
    """The constructor of `owner`.

    Raises:
        UsageError: If its source cannot be read, or it has a parameter `group`.
    """
    if owner.__init__ is nn.Module.__init__:
        return Constructor([], [], set(), owner.__module__, [])
    method = method_of(owner, "__init__")
    arguments = method.tree.args
    plain = [one.arg for one in [*arguments.posonlyargs, *arguments.args]][1:]
    taken = {*plain, *(one.arg for one in arguments.kwonlyargs)}
    for name in ("group", "dense"):
        if name in taken:
            raise UsageError(
                f"{owner.__name__} has an argument '{name}', which the sharded layer uses"
                " itself; give it another name"
            )
    known = _known(method.tree, method.module)
    return Constructor(
        parameters=list(_parameters(arguments, known)),
        call=list(_handed_on(arguments)),
        names=known & _names_of(arguments),
        module=method.module,
        plain=plain,
    )


def _names_of(arguments: ast.arguments) -> set[str]:
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    names = {name for node in defaults if node for name in free_names(node)}
    annotations = [one.annotation for one in _all(arguments)]
    return names | {name for node in annotations if node for name in _free(node)}


def _free(node: ast.expr) -> set[str]:
    """The names in an annotation, which may be a text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return free_names(ast.parse(node.value, mode="eval"))
        except SyntaxError:
            return set()
    return free_names(node)


def _all(arguments: ast.arguments) -> list[ast.arg]:
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [one for one in (arguments.vararg, arguments.kwarg) if one]


def _known(tree: ast.FunctionDef, module: str) -> set[str]:
    """The names in the signature that can be imported."""
    known = set()
    for name in _names_of(tree.args):
        try:
            list(imports_of([name], module))
        except UsageError:
            continue
        known.add(name)
    return known


def _parameters(arguments: ast.arguments, known: set[str]) -> Iterator[str]:
    """Each parameter as text. An annotation whose names nobody can import is left out."""
    plain = [*arguments.posonlyargs, *arguments.args]
    missing = len(plain) - len(arguments.defaults)
    defaults: list[Any] = [None] * missing + list(arguments.defaults)
    for place, (one, default) in enumerate(zip(plain, defaults, strict=True)):
        if place:
            yield _parameter(one, default, known)
        if arguments.posonlyargs and place == len(arguments.posonlyargs) - 1 and place:
            yield "/"
    if arguments.vararg:
        yield f"*{_parameter(arguments.vararg, None, known)}"
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if one is arguments.kwonlyargs[0] and not arguments.vararg:
            yield "*"
        yield _parameter(one, default, known)
    if not (arguments.vararg or arguments.kwonlyargs):
        yield "*"
    yield "group: GroupLike = None"
    if arguments.kwarg:
        yield f"**{_parameter(arguments.kwarg, None, known)}"


def _parameter(one: ast.arg, default: ast.expr | None, known: set[str]) -> str:
    annotation, text = one.annotation, one.arg
    if annotation is not None and _free(annotation) <= known:
        text += f": {_written(annotation)}"
    if default is None:
        return text
    unknown = free_names(default) - known
    if unknown:
        raise UsageError(
            f"the default of {one.arg} names {min(unknown)}, which cannot be imported"
        )
    return (
        f"{text} = {_written(default)}"
        if ":" in text
        else f"{text}={_written(default)}"
    )


def _written(node: ast.expr) -> str:
    """The expression as ruff writes it: with double quotes."""
    text = ast.unparse(node)
    return text.replace("'", '"') if '"' not in text else text


def _handed_on(arguments: ast.arguments) -> Iterator[str]:
    for one in [*arguments.posonlyargs, *arguments.args][1:]:
        yield one.arg
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    for one in arguments.kwonlyargs:
        yield f"{one.arg}={one.arg}"
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"
