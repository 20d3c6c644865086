"""A dense class as its source has it: its methods, and where the names in them come from."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError


@dataclass(frozen=True)
class Method:
    """A function of the class, as text.

    Attributes:
        name: Its name.
        text: Its source, decorators included, not indented.
        tree: The source, parsed.
        module: Name of the module that it is written in.
    """

    name: str
    text: str
    tree: ast.FunctionDef
    module: str

    @property
    def own_reads(self) -> set[str]:
        """The attributes of `self` that it names."""
        first = self.first_argument
        return {
            node.attr
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == first
        }

    @property
    def first_argument(self) -> str:
        """What it calls `self`; empty for a static method."""
        args = [*self.tree.args.posonlyargs, *self.tree.args.args]
        is_static = any(
            isinstance(node, ast.Name) and node.id == "staticmethod"
            for node in self.tree.decorator_list
        )
        return args[0].arg if args and not is_static else ""


class _Sequence(nn.Module):
    """What nn.Sequential computes, for a class that cannot be iterated over as one."""

    def forward(self, input: Tensor) -> Tensor:
        for module in self._modules.values():
            input = module(input)  # type: ignore[misc]
        return input


def function_of(owner: type, name: str) -> Any:
    """What `owner`, or a base of it, holds under `name`: a function, or what wraps one."""
    found = inspect.getattr_static(owner, name)
    return _Sequence.forward if found is nn.Sequential.forward else found


def method_of(owner: type, name: str) -> Method:
    """The method `name` of the class `owner`, wherever in its bases it is written.

    Raises:
        UsageError: If its source cannot be read.
    """
    function = _unwrapped(function_of(owner, name))
    where = f"{owner.__name__}.{name}"
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, IndexError) as error:
        raise UsageError(
            f"the source of {where} cannot be read ({error}); write it as a function in a"
            " module's file"
        ) from error
    if not isinstance(tree, ast.FunctionDef):
        raise UsageError(
            f"{where} is not written as a function, so it is not carried over"
        )
    return Method(
        name=name,
        text=text.rstrip() + "\n",
        tree=tree,
        module=function.__module__,
    )


def _unwrapped(found: Any) -> Callable[..., Any]:
    """The function behind what a class holds under a name."""
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if isinstance(found, property):
        found = found.fget
    function: Callable[..., Any] = inspect.unwrap(found)
    return function


def is_code(owner: type, name: str) -> bool:
    """Whether `owner` holds code under `name`: a method, or a property."""
    found = inspect.getattr_static(owner, name, None)
    return inspect.isfunction(found) or isinstance(
        found, staticmethod | classmethod | property
    )


def carried_methods(owner: type, base: type) -> list[Method]:
    """`forward`, and every method that it reaches through `self` and `base` lacks."""
    found: dict[str, Method] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = method_of(owner, name)
        reads = sorted(found[name].own_reads)
        waiting += [
            read for read in reads if is_code(owner, read) and not hasattr(base, read)
        ]
    return list(found.values())


def free_names(tree: ast.AST) -> set[str]:
    """The names that `tree` reads and does not itself bind, builtins left out."""
    loaded: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            loaded |= (
                _names_in_text(node.value) if _is_annotation(tree, node) else set()
            )
    return {name for name in loaded - bound if not hasattr(builtins, name)}


def _is_annotation(tree: ast.AST, text: ast.Constant) -> bool:
    for node in ast.walk(tree):
        places = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if any(place is text for place in places):
            return True
    return False


def _names_in_text(text: str) -> set[str]:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return set()
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def imports_of(names: Iterable[str], module: str) -> Iterator[str]:
    """Yield the import that gives each name the meaning that it has in `module`.

    Raises:
        UsageError: If a name has none there.
    """
    source = sys.modules[module]
    lines = _import_lines(source)
    for name in sorted(names):
        if name in lines:
            yield lines[name]
        elif hasattr(source, name):
            yield f"from {module} import {name}"
        else:
            raise UsageError(
                f"the name '{name}' has no meaning in {module}, so it cannot be carried over"
            )


def _import_lines(source: Any) -> dict[str, str]:
    """For each name that a module imports, the absolute import of it alone."""
    try:
        tree = ast.parse(inspect.getsource(source))
    except (OSError, TypeError):
        return {}
    lines: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                lines[bound] = f"import {ast.unparse(alias)}"
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            origin = _absolute(node, source)
            for alias in node.names:
                if alias.name != "*":
                    bound = alias.asname or alias.name
                    lines[bound] = f"from {origin} import {ast.unparse(alias)}"
    return lines


def _absolute(node: ast.ImportFrom, source: Any) -> str:
    if not node.level:
        return node.module or ""
    parts = (source.__package__ or "").split(".")
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)
