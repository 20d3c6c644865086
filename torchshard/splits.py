"""How a class of layers can be divided: said once, on the class, as data.

A class names its splits; arguments, plans, errors, the command line and the documentation
read them there. TorchShard's codes (`dim=1`, `dim=0`) are turned into names here and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torchshard.errors import LayoutError

Dim: TypeAlias = "int | str | None"
"""What a constructor's `dim` may be: a code, a split's name, or None for no split."""


@dataclass(frozen=True)
class Split:
    """One way in which a class of layers can be divided; the class names it in `splits`.

    Args:
        divides: What it divides, in words, for errors and documentation.
        dims: TorchShard's codes for it, which the constructor's `dim` takes. A class with
            one split and no codes is always divided so.
    """

    divides: str
    dims: tuple[int, ...] = ()


Splits: TypeAlias = Mapping[str, Split]

FEATURES: Splits = {
    "column": Split("the output features", (1, -1)),
    "row": Split("the input features", (0,)),
}
"""The splits of layers that map features, or channels, to features."""

TABLE: Splits = {
    "vocabulary": Split("the vocabulary's rows", (0,)),
    "embedding_dim": Split("the embedding's columns", (1, -1)),
}
"""The splits of layers that look up rows of a table."""


def split_named(splits: Splits, dim: Dim) -> str:
    """Return the name of the split that `dim` asks for; "whole" for none.

    Args:
        splits: Those of the class.
        dim: A code or a name; None is no split, or the only one of a class without codes.

    Raises:
        LayoutError: If the class has no such split.

    Example:
        >>> split_named(FEATURES, -1), split_named(FEATURES, None)
        ('column', 'whole')
    """
    if dim is None:
        only = [name for name, split in splits.items() if not split.dims]
        return only[0] if len(splits) == 1 and only else "whole"
    for name, split in splits.items():
        if dim == name or (type(dim) is int and dim in split.dims):
            return name
    raise LayoutError(f"dim={dim!r} is no split. Expected {in_words(splits)}.")


def code_of(splits: Splits, name: str) -> int | None:
    """Return TorchShard's code for the split of that name; None if it has none."""
    dims = splits[name].dims if name in splits else ()
    return dims[0] if dims else None


def in_words(splits: Splits) -> str:
    """Return what `dim` can be and what each divides, as an error says it."""
    ways = ["None (not divided)"]
    for name, split in splits.items():
        codes = ", ".join(map(str, split.dims))
        spelled = f"{codes} or {name!r}" if codes else repr(name)
        ways.append(f"{spelled} ({split.divides} are divided)")
    return ", ".join(ways)


def split_of(dim: Dim) -> str:
    """Return the name that `dim` has for layers that divide features.

    None is `"whole"`, 1 and -1 are `"column"`, 0 is `"row"`.

    Raises:
        LayoutError: If `dim` is another value.
    """
    return split_named(FEATURES, dim)
