"""One edit of a package's `__init__.py`: the line that exports a new class.

Text in, text out. The line is put where isort would put it, into `__all__` too where there
is one, and nothing else is touched: comments, order and line endings stay.
"""

import ast
import re
from collections.abc import Sequence
from typing import TypeAlias

from ..errors import UsageError
from .package_source import Edit, Source, all_value, is_from, literal

MAX_WIDTH = 88
Import: TypeAlias = ast.Import | ast.ImportFrom


def add_export(text: str, module: str, name: str) -> str:
    """`text` with `from .module import name`, and `name` in `__all__` if there is one.

    Raises:
        UsageError: If `text` is not Python, or means something else by `name`.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    source = Source(text.removeprefix(mark))
    taken = _other_meaning(source.tree.body, module, name)
    if taken:
        raise UsageError(
            f"'{name}' is already defined in __init__.py, line {taken}; "
            "choose another name"
        )
    edits = [*_import_edits(source, module, name), *_all_edits(source, name)]
    return mark + source.edited(edits)


def _other_meaning(body: Sequence[ast.stmt], module: str, name: str) -> int:
    """Line on which `name` is bound to anything but the class of `.module`; 0 if none."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            bound = [node.name]
        elif isinstance(node, ast.Assign):
            bound = [
                target.id for target in node.targets if isinstance(target, ast.Name)
            ]
        elif isinstance(node, ast.Import | ast.ImportFrom) and not is_from(
            node, module
        ):
            bound = [alias.asname or alias.name for alias in node.names]
        else:
            continue
        if name in bound:
            return node.lineno
    return 0


def _import_edits(source: Source, module: str, name: str) -> list[Edit]:
    body = source.tree.body
    same = [
        node
        for node in body
        if isinstance(node, ast.ImportFrom) and is_from(node, module)
    ]
    if any(alias.name in (name, "*") for node in same for alias in node.names):
        return []
    if same:
        return [_merged(source, same[-1], name)]
    run = _import_run(body)
    exported = f"{name} as {name}" if _repeats_names(run, body) else name
    line = f"from .{module} import {exported}\n"
    return [_placed(source, run, module, line)]


def _merged(source: Source, node: ast.ImportFrom, name: str) -> Edit:
    """`name` among the names that `node` imports from the same module."""
    text = source.segment(node)
    if "#" in text:
        after = source.line_after(node)
        return (after, after, f"from .{node.module} import {name}\n")
    names = [ast.unparse(alias) for alias in node.names]
    names.insert(_place(names, name), name)
    line = f"from .{node.module} import {', '.join(names)}"
    if len(line) > MAX_WIDTH or re.search(r",\s*\)$", text):
        listed = "".join(f"    {one},\n" for one in names)
        line = f"from .{node.module} import (\n{listed})"
    return (source.start(node), source.end(node), line)


def _import_run(body: Sequence[ast.stmt]) -> list[Import]:
    """The first unbroken run of imports that holds a relative one; or else the first run."""
    runs: list[list[Import]] = [[]]
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            runs[-1].append(node)
        elif runs[-1]:
            runs.append([])
    relative = [run for run in runs if any(_level(node) for node in run)]
    return (relative or runs)[0]


def _repeats_names(run: Sequence[Import], body: Sequence[ast.stmt]) -> bool:
    """Whether to export in the form `import X as X`, as the file does.

    Where it exports nothing yet and has no `__all__`, linters take that form alone for an
    export and not for an unused import.
    """
    names = [alias for node in run if _level(node) for alias in node.names]
    if not names:
        return all_value(body) is None
    return all(alias.asname == alias.name for alias in names)


def _level(node: Import) -> int:
    return node.level if isinstance(node, ast.ImportFrom) else 0


def _placed(source: Source, run: list[Import], module: str, line: str) -> Edit:
    """The place for `line`, a new import from `.module`."""
    relative = [node for node in run if _level(node)]
    before = [node for node in relative if _import_key(node) < (-1, _natural(module))]
    if before:
        at = source.line_after(before[-1])
    elif relative:
        at = source.above(relative[0])
        if at < source.start(relative[0]):  # isort wants a gap above a comment
            line += "\n"
    elif run:
        at = source.line_after(run[-1])
        line = "\n" + line
    else:
        return _first_import(source, line)
    return (at, at, line)


def _import_key(node: Import) -> tuple[int, list[int | str]]:
    """Order of relative imports: the furthest parent first, then by module."""
    module = node.module if isinstance(node, ast.ImportFrom) else None
    return (-_level(node), _natural(module or ""))


def _first_import(source: Source, line: str) -> Edit:
    """The place for `line` in a file without imports: below its docstring and licence."""
    body = source.tree.body
    has_docstring = bool(body) and _is_docstring(body[0])
    if has_docstring:
        at = source.line_after(body[0])
        follows = source.text[at:]
        after = "" if not follows.strip() or follows[:1] in "\r\n" else "\n"
        return (at, at, f"\n{line}{after}")
    if body:
        at = source.above(body[0])
        return (at, at, f"{line}\n")
    at = len(source.text)
    return (at, at, f"\n{line}" if source.text.strip() else line)


def _is_docstring(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _all_edits(source: Source, name: str) -> list[Edit]:
    value = all_value(source.tree.body)
    if value is None:
        return []
    if any(isinstance(x, ast.Constant) and x.value == name for x in value.elts):
        return []
    quote = source.segment(value.elts[0])[:1] if value.elts else '"'
    item = f"'{name}'" if quote == "'" else f'"{name}"'
    at = _place([literal(element) for element in value.elts], name)
    if value.lineno == value.end_lineno:
        return [_one_line(source, value, at, item)]
    return [_many_lines(source, value, at, item)]


def _one_line(source: Source, value: ast.List | ast.Tuple, at: int, item: str) -> Edit:
    text = source.segment(value)
    opened, closed = ("[", "]") if isinstance(value, ast.List) else ("(", ")")
    items = [source.segment(element) for element in value.elts]
    items.insert(at, item)
    single = isinstance(value, ast.Tuple) and len(items) == 1
    line = f"{opened}{', '.join(items)}{',' if single else ''}{closed}"
    last = source.lines[value.lineno - 1].rstrip("\r\n")
    if len(last) - len(text) + len(line) > MAX_WIDTH:
        line = opened + "\n" + "".join(f"    {one},\n" for one in items) + closed
    return (source.start(value), source.end(value), line)


def _many_lines(
    source: Source, value: ast.List | ast.Tuple, at: int, item: str
) -> Edit:
    """A line of its own where the others have one, and a comma after the last."""
    elements = value.elts
    if not elements:
        start = source.start(value) + 1
        return (start, start, f"\n    {item},")
    own_lines = len({element.lineno for element in elements}) == len(elements)
    if at < len(elements):
        start = source.start(elements[at])
        indent = " " * elements[at].col_offset
        return (start, start, f"{item},\n{indent}" if own_lines else f"{item}, ")
    last = elements[-1]
    end = source.end(last)
    comma = re.match(r"\s*,", source.text[end:])
    start = end + (comma.end() if comma else 0)
    gap = "\n" + " " * last.col_offset if own_lines else " "
    return (start, start, f"{'' if comma else ','}{gap}{item},")


def _place(names: Sequence[str], name: str) -> int:
    """Index in `names` before the first that sorts after `name`."""
    later = (
        i for i, other in enumerate(names) if _member_key(other) > _member_key(name)
    )
    return next(later, len(names))


def _member_key(name: str) -> tuple[int, list[int | str]]:
    """The order of names in an import: CONSTANTS, then Classes, then functions."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return (kind, _natural(name))


def _natural(name: str) -> list[int | str]:
    """A sort key under which `conv2d` comes before `conv10d`."""
    parts = re.split(r"(\d+)", name.lower())
    return [int(part) if part.isdigit() else part for part in parts]
