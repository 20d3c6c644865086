"""What the generated constructor does, and what each rank then holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torchshard as ts
from torch import nn

from .constructor import Constructor
from .division import Division
from .source import Method, is_code


def constructor_text(
    dense: str,
    constructor: Constructor,
    division: Division,
    modules: Sequence[nn.Module],
    methods: Sequence[Method],
) -> str:
    """The constructor of the sharded layer, as code that nobody laid out.

    Args:
        dense: Name of the dense class.
        constructor: Its constructor.
        division: What is divided.
        modules: The class, built in every way that is tried.
        methods: Those that are carried over.
    """
    lines = [
        "super().__init__(group)",
        "# Built once, whole: it has the shapes and the first values.",
        f"dense = {dense}({constructor.call})",
        f"self.take_over(dense, {_quoted(division.parameters)})",
    ]
    if division.modules:
        is_strict = all(division.present(one) == division.modules for one in modules)
        options = "group=self.group" if is_strict else "group=self.group, strict=False"
        lines.append(f"ts.parallelize(self, {_quoted(division.modules)}, {options})")
    names = class_attributes(type(modules[0]), methods)
    lines += [f"self.{name} = dense.{name}" for name in names]
    body = "".join(f"    {line}\n" for line in lines)
    return f"def __init__({constructor.parameters}) -> None:\n{body}"


def _quoted(values: Mapping[str, object]) -> str:
    """The dict as ruff writes it: with double quotes."""
    return repr(dict(values)).replace("'", '"')


def class_attributes(owner: type, methods: Iterable[Method]) -> list[str]:
    """What the methods read of the class that is no code: numbers, texts."""
    reads = {name for method in methods for name in method.own_reads}
    return sorted(
        name
        for name in reads - {*dir(ts.MarkedLayer)}
        if hasattr(owner, name) and not is_code(owner, name)
    )


def first_dims(module: nn.Module) -> Division:
    """For a layer without a forward yet: dim 0 of every parameter of its own."""
    named = module.named_parameters(recurse=False)
    return Division({}, {name: 0 for name, parameter in named if parameter.dim()})


def held(module: nn.Module, division: Division) -> list[str]:
    """What each rank holds of every parameter, a line to each."""
    named = dict(module.named_parameters())
    width = max(map(len, named), default=0)
    return [
        f"{name:{width}}  {_how(name, division)}"
        f"{'' if parameter.requires_grad else ', frozen'}"
        for name, parameter in named.items()
    ]


def _how(name: str, division: Division) -> str:
    if name in division.parameters:
        return f"its part of dim {division.parameters[name]}"
    for path, split in division.modules.items():
        if name.startswith(f"{path}."):
            return f"its part, in a layer divided by {split}"
    return "whole"
