"""Edits of a method's text, which keep all else as its author wrote it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from .source import Method

Place: TypeAlias = tuple[int, int, int, int]
"""First line, first column, last line, last column of an expression, as `ast` has them."""


def place_of(node: ast.expr) -> Place:
    """Where `node` stands in its method's text."""
    assert node.end_lineno is not None  # ast.parse sets both
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


@dataclass(frozen=True)
class Change:
    """What is done to one operation.

    Attributes:
        kind: `gather` makes arguments whole first; the other kinds are names of functions in
            `products`, called in the operation's place.
        function: For those, the function of torch that they are given, as it is written;
            empty where they stand for one alone.
        at: For `on_shards`, the sharded dim of the result.
        gathered: Places among the arguments, counted with the object of a method as the
            first, of those that are gathered.
    """

    kind: str
    function: str = ""
    at: int | None = None
    gathered: tuple[int | str, ...] = ()


@dataclass
class Edited:
    """A method's text, with insertions and cuts collected and then made at once."""

    method: Method
    _edits: list[tuple[int, int, int, str]] = field(default_factory=list)

    def _offset(self, line: int, column: int) -> int:
        lines = self.method.text.splitlines(keepends=True)
        before = lines[line - 1].encode()[:column].decode()
        return sum(map(len, lines[: line - 1])) + len(before)

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Offset of the first character of `node`."""
        return self._offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Offset behind the last character of `node`."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def replace(self, start: int, end: int, text: str, outer: int = 0) -> None:
        """Put `text` in the place of what lies there; an `outer` edit goes around inner ones."""
        self._edits.append((start, end, outer, text))

    def wrap(self, node: ast.expr, before: str, after: str) -> None:
        """Put `before` and `after` around `node`."""
        size = self.end(node) - self.start(node)
        self.replace(self.start(node), self.start(node), before, -size)
        self.replace(self.end(node), self.end(node), after, size)

    def text(self) -> str:
        """The text with all edits made."""
        pieces, done = [], 0
        for start, end, _, new in sorted(self._edits, key=lambda edit: edit[:3]):
            pieces += [self.method.text[done:start], new]
            done = end
        return "".join([*pieces, self.method.text[done:]])

    def between(self, left: int, right: int, old: str, new: str) -> None:
        """Put `new` in the place of the one `old` between two offsets."""
        place = self.method.text.index(old, left, right)
        self.replace(place, place + len(old), new)


def changed(method: Method, changes: dict[Place, Change], shards: Iterable[str]) -> str:
    """The text of `method` with `changes`, and its `shards` read as local variables.

    Args:
        method: The method.
        changes: What is done to the operations at those places.
        shards: The parameters that are divided: `self.weight` becomes `weight`.
    """
    edited = Edited(method)
    names = {name: local_name(method, name) for name in shards}
    for node in ast.walk(method.tree):
        if isinstance(node, ast.expr) and place_of(node) in changes:
            change = changes[place_of(node)]
            if isinstance(node, ast.Call | ast.BinOp | ast.Subscript):
                _change(edited, node, change)
        if _is_own(node, method) and node.attr in names:  # type: ignore[attr-defined]
            start, end = edited.start(node), edited.end(node)  # type: ignore[arg-type]
            edited.replace(start, end, names[node.attr])  # type: ignore[attr-defined]
    return edited.text()


def _is_own(node: ast.AST, method: Method) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == method.first_argument
        and isinstance(node.ctx, ast.Load)
    )


def local_name(method: Method, name: str) -> str:
    """What the parameter `name` is called inside `method`; another name if that is taken."""
    taken = {
        node.id for node in ast.walk(method.tree) if isinstance(node, ast.Name)
    } | {node.arg for node in ast.walk(method.tree) if isinstance(node, ast.arg)}
    return f"own_{name}" if name in taken else name


def operands(
    node: ast.Call | ast.BinOp | ast.Subscript,
) -> list[tuple[int | str, ast.expr]]:
    """The expressions that an operation works on, by position or by keyword."""
    if isinstance(node, ast.BinOp):
        return [(0, node.left), (1, node.right)]
    if isinstance(node, ast.Subscript):
        return [(0, node.value), (1, node.slice)]
    found: list[tuple[int | str, ast.expr]] = []
    if isinstance(node.func, ast.Attribute):
        found.append(("object", node.func.value))
    found += list(enumerate(node.args))
    found += [(one.arg, one.value) for one in node.keywords if one.arg]
    return found


def _change(
    edited: Edited, node: ast.Call | ast.BinOp | ast.Subscript, change: Change
) -> None:
    if change.kind == "gather":
        for name, operand in operands(node):
            if name in change.gathered:
                edited.wrap(operand, "whole(", ")")
            elif f"{name}*" in change.gathered:
                edited.wrap(operand, "[whole(part) for part in ", "]")
        return
    head = f"{change.kind}({change.function}{', ' if change.function else ''}"
    method_text = edited.method.text
    tail = "" if change.at is None else f", at={change.at}"
    size = edited.end(node) - edited.start(node)
    edited.replace(edited.start(node), edited.start(node), head, -size)
    if isinstance(node, ast.BinOp):
        between = method_text[edited.end(node.left) : edited.start(node.right)]
        sign = re.search(r"\s*@\s*", between)
        assert sign is not None  # a product of matrices is written so
        start = edited.end(node.left) + sign.start()
        edited.replace(start, start + len(sign[0]), ", ")
        edited.replace(edited.end(node), edited.end(node), f"{tail})", size)
    elif isinstance(node, ast.Subscript):
        edited.between(edited.end(node.value), edited.start(node.slice), "[", ", ")
        edited.replace(edited.end(node) - 1, edited.end(node), f"{tail})")
    else:
        _change_call(edited, node, tail, change)


def _change_call(edited: Edited, node: ast.Call, tail: str, change: Change) -> None:
    """`F.linear(x, w)` to `on_shards(F.linear, x, w, at=-1)`; `x.mm(w)` likewise."""
    values = [*node.args, *(one.value for one in node.keywords)]
    last = max(values, key=edited.end)
    opening = edited.end(node.func)
    if (
        change.function
        and isinstance(node.func, ast.Attribute)
        and _is_method(node, change)
    ):
        name_start = edited.end(node.func.value)
        edited.replace(name_start, opening, ", ")
        edited.between(opening, edited.start(values[0]), "(", "")
    else:
        edited.replace(edited.start(node.func), opening, "")
        edited.between(opening, edited.start(values[0]), "(", "")
    if tail:
        # Outside whatever is put behind the last argument itself.
        edited.replace(edited.end(last), edited.end(last), tail, 10**6)


def _is_method(node: ast.Call, change: Change) -> bool:
    """Whether the operation is written as a method of its first argument."""
    return ast.unparse(node.func) != change.function
