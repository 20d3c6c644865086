"""The text of a package's `__init__.py`, and where in it what stands.

Text in, text out: an edit replaces a stretch of the text, and nothing else is touched.
"""

import ast
import re
from collections.abc import Sequence
from typing import TypeAlias

from ..errors import UsageError

Edit: TypeAlias = tuple[int, int, str]  # from, to (offsets in the text), new text


class Source:
    """Python text, and the offsets of its lines and nodes.

    Raises:
        UsageError: If the text is not Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise UsageError(
                f"__init__.py is not valid Python, line {error.lineno}: {error.msg}; "
                "mend it first"
            ) from error

    def offset(self, line: int, column: int) -> int:
        """Offset of a position as `ast` gives it: line from 1, column in UTF-8 bytes."""
        before = self.lines[line - 1].encode()[:column].decode()
        return self.starts[line - 1] + len(before)

    def start(self, node: ast.expr | ast.stmt) -> int:
        """Offset of `node`."""
        return self.offset(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        """Offset of what follows `node`."""
        assert node.end_lineno is not None  # ast.parse sets it on every node
        assert node.end_col_offset is not None
        return self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """The text of `node`."""
        return self.text[self.start(node) : self.end(node)]

    def line_after(self, node: ast.stmt) -> int:
        """Offset of the line after the last one of `node`."""
        assert node.end_lineno is not None
        return self.starts[node.end_lineno]

    def above(self, node: ast.stmt) -> int:
        """Offset of the line of `node`, or of the comment right above it.

        A comment that opens the file is its licence or its shebang, not the node's.
        """
        line = node.lineno
        while line > 1 and self.lines[line - 2].lstrip().startswith("#"):
            line -= 1
        return self.starts[(node.lineno if line == 1 else line) - 1]

    def edited(self, edits: Sequence[Edit]) -> str:
        """The text after `edits`, which do not overlap."""
        text = self.text
        for start, end, new in sorted(edits, reverse=True):
            if new and start == len(text) and text and not text.endswith(("\n", "\r")):
                new = "\n" + new
            text = text[:start] + new.replace("\n", self.newline) + text[end:]
        return text


def is_from(node: ast.stmt, module: str) -> bool:
    """Whether `node` imports from the sibling `module`."""
    return (
        isinstance(node, ast.ImportFrom) and node.level == 1 and node.module == module
    )


def all_value(body: Sequence[ast.stmt]) -> ast.List | ast.Tuple | None:
    """The list or tuple that `__all__` is set to, if it is spelled out."""
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(x, ast.Name) and x.id == "__all__" for x in targets):
            value = node.value  # type: ignore[attr-defined]  # one of the two above
            return value if isinstance(value, ast.List | ast.Tuple) else None
    return None


def literal(element: ast.expr) -> str:
    """The text that `element` spells; empty if it is none."""
    return str(element.value) if isinstance(element, ast.Constant) else ""
