"""What a generated file imports."""

from __future__ import annotations
import __future__

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import UsageError
from .constructor import Constructor
from .source import Method, free_names, imports_of

_OURS = {
    "Any": "from typing import Any",
    "GroupLike": "from torchshard.distributed import GroupLike",
    "ts": "import torchshard as ts",
}
"""What the names in generated code mean."""


def imports(
    owner: type,
    module: str,
    constructor: Constructor,
    methods: Sequence[Method],
) -> Iterator[str]:
    """Every import of the generated module, a name to a line.

    Args:
        owner: The dense class.
        module: The module that it was named in.
        constructor: Its constructor.
        methods: Those that are carried over; none for a forward that is left to write.

    Raises:
        UsageError: If a name would have two meanings.
    """
    lines = {_OURS["ts"], _OURS["GroupLike"]}
    if not methods:
        lines.add(_OURS["Any"])
    for method in methods:
        own = free_names(method.tree) - {owner.__name__}
        lines |= set(imports_of(own, method.module))
    lines |= set(imports_of(constructor.names - {owner.__name__}, constructor.module))
    if _postpones_annotations(owner):
        lines.add("from __future__ import annotations")
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
