"""What a generated file imports, and which of the products it holds."""

from __future__ import annotations
import __future__

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ..errors import UsageError
from . import products, text
from .constructor import Constructor
from .source import Method, free_names, imports_of

OURS = {
    "Any": "from typing import Any",
    "Callable": "from collections.abc import Callable",
    "F": "import torch.nn.functional as F",
    "GroupLike": "from torchshard.distributed import GroupLike",
    "Tensor": "from torch import Tensor",
    "collectives": "from torchshard.distributed import collectives",
    "copy": "from torchshard.distributed import copy",
    "operator": "import operator",
    "reduce": "from torchshard.distributed import reduce",
    "torch": "import torch",
    "ts": "import torchshard as ts",
    "whole": "from torchshard.tensor import whole",
}
"""What the names in generated code mean."""


def used_products(code: str) -> list[str]:
    """The functions of `products` that `code` calls, and those that they call."""
    found: set[str] = set()
    waiting = [name for name in PRODUCTS if f"{name}(" in code]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            names = free_names(ast.parse(text.sources(products, [name])))
            waiting += [other for other in PRODUCTS if other in names]
    return [name for name in PRODUCTS if name in found]


PRODUCTS = ("on_shards", "summed", "row_linear", "lookup", "embedding", "_own")


def imports(
    owner: type,
    module: str,
    constructor: Constructor,
    methods: Sequence[Method],
    texts: Sequence[str],
    used: Sequence[str],
    has_shards: bool,
) -> Iterator[str]:
    """Every import of the generated module, a name to a line."""
    names = _free_in_functions([*texts, text.sources(products, used)]) - set(PRODUCTS)
    theirs: set[str] = set()
    lines: set[str] = set()
    for method in methods:
        if method.module:
            own = (free_names(method.tree) & names) - {owner.__name__}
            lines |= set(imports_of(own, method.module))
            theirs |= own
    lines |= set(imports_of(constructor.names - {owner.__name__}, constructor.module))
    if _postpones_annotations(owner):
        lines.add("from __future__ import annotations")
    needed = (names - theirs) | ({"Tensor"} if has_shards else set())
    for name in needed | {"ts", "GroupLike", "collectives"}:
        if name in OURS:
            lines.add(OURS[name])
    lines.add(f"from {module} import {owner.__name__}")
    meanings: dict[str, str] = {}
    for line in sorted(lines):
        name = line.split()[-1]
        if meanings.setdefault(name, line) != line:
            raise UsageError(
                f"'{name}' would have two meanings in the generated file: {meanings[name]},"
                f" and {line}. Rename it in {owner.__name__}"
            )
    yield from sorted(lines)


def _free_in_functions(codes: Iterable[str]) -> set[str]:
    """The names that the functions in some pieces of code take from outside."""
    found: set[str] = set()
    for code in codes:
        for node in ast.parse(textwrap.dedent(code)).body:
            found |= free_names(node)
    return found


def _postpones_annotations(owner: type) -> bool:
    return (
        getattr(sys.modules[owner.__module__], "annotations", None)
        is __future__.annotations
    )


def is_local(module: str) -> bool:
    """Whether a module belongs to the project and not to what is installed."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("torch", "torchshard"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in Path(file).parts
