"""The other edit of a package's `__init__.py`: what is taken out once a module is gone."""

import ast
import re
from collections.abc import Sequence, Set

from ..errors import UsageError
from .package_source import Edit, Source, all_value, is_from, literal


def remove_export(text: str, module: str, name: str) -> str:
    """`text` without what it imports from `.module`, which is gone; nor in `__all__`.

    Args:
        text: The text of the file.
        module: The module that is gone.
        name: The class that was in it, which `from .module import *` does not say.

    Raises:
        UsageError: If `text` is not Python, or would still import the module.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    source = Source(text.removeprefix(mark))
    nodes = [node for node in source.tree.body if is_from(node, module)]
    names = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names |= {name} if "*" in names else set()
    edits = [_removed_line(source, node) for node in nodes]
    edits += _all_removals(source, names)
    _check_others(source, nodes, module)
    return mark + source.edited(edits)


def _removed_line(source: Source, node: ast.stmt) -> Edit:
    """The lines of `node`, with one empty line where two would be left."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno)
    around = source.lines[first:last]
    rest = "".join(around).replace(source.segment(node), "", 1).strip()
    if rest and not rest.startswith("#"):
        raise UsageError(
            f"the import on line {node.lineno} shares its line with something else; "
            "take it out by hand first"
        )
    is_below = last < len(source.lines) and bool(source.lines[last].strip())
    if not is_below and first and not source.lines[first - 1].strip():
        first -= 1
    elif not is_below and not first:
        while last < len(source.lines) and not source.lines[last].strip():
            last += 1
    return (source.starts[first], source.starts[last], "")


def _all_removals(source: Source, names: Set[str]) -> list[Edit]:
    """`__all__` without `names`."""
    value = all_value(source.tree.body)
    gone = [x for x in value.elts if literal(x) in names] if value else []
    if value is None or not gone:
        return []
    kept = [source.segment(x) for x in value.elts if x not in gone]
    if value.lineno == value.end_lineno:
        opened, closed = ("[", "]") if isinstance(value, ast.List) else ("(", ")")
        comma = "," if isinstance(value, ast.Tuple) and len(kept) == 1 else ""
        line = f"{opened}{', '.join(kept)}{comma}{closed}"
        return [(source.start(value), source.end(value), line)]
    return [_removed_element(source, element) for element in gone]


def _removed_element(source: Source, element: ast.expr) -> Edit:
    """An element, its comma, and its line where it has one to itself."""
    line = source.lines[element.lineno - 1]
    if re.fullmatch(r"\s*(['\"])\w+\1\s*,?\s*(#.*)?\s*", line):
        return (source.starts[element.lineno - 1], source.starts[element.lineno], "")
    start, end = source.start(element), source.end(element)
    comma = re.match(r"\s*,[ \t]*", source.text[end:])
    return (start, end + (comma.end() if comma else 0), "")


def _check_others(source: Source, removed: Sequence[ast.stmt], module: str) -> None:
    """Refuse a file that could not be imported once `module` is gone."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom) or node.level != 1 or node in removed:
            continue
        names = [alias.name for alias in node.names]
        if node.module == module or (node.module is None and module in names):
            raise UsageError(
                f"line {node.lineno} still imports '{module}'; take that out by hand first"
            )
