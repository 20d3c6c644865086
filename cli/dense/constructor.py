"""The constructor of a dense class: its signature as text, and how to pass it on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..errors import UsageError
from .source import free_names, imports_of, method_of


@dataclass(frozen=True)
class Constructor:
    """What is known of a constructor.

    Attributes:
        parameters: Its parameters as text, and `group`.
        call: The arguments that hand all of them on, as text.
        names: The names that its defaults and annotations use.
        module: Name of the module in which those have their meaning.
    """

    parameters: str
    call: str
    names: set[str]
    module: str


def read_constructor(owner: type[nn.Module]) -> Constructor:
    """The constructor of `owner`.

    Raises:
        UsageError: If its source cannot be read, or it has a parameter `group`.
    """
    if owner.__init__ is nn.Module.__init__:
        return Constructor("self, *, group: GroupLike = None", "", set(), "torch")
    method = method_of(owner, "__init__")
    arguments = method.tree.args
    for name in ("group", "dense"):
        if name in {one.arg for one in _all(arguments)}:
            raise UsageError(
                f"{owner.__name__} has an argument '{name}', which the sharded layer uses"
                " itself; give it another name"
            )
    [*arguments.posonlyargs, *arguments.args][0].arg = "self"
    _leave_out_unknown(arguments, method.module)
    names, call = _names_of(arguments), ", ".join(_handed_on(arguments))
    group = ast.arg("group", annotation=ast.Name("GroupLike"))
    arguments.kwonlyargs.append(group)
    arguments.kw_defaults.append(ast.Constant(None))
    return Constructor(ast.unparse(arguments), call, names, method.module)


def _leave_out_unknown(arguments: ast.arguments, module: str) -> None:
    """Take out annotations whose names nobody can import; a default has to be known."""
    for one in _all(arguments):
        if one.annotation and not _are_known(free_names(one), module):
            one.annotation = None
    for default in [*arguments.defaults, *arguments.kw_defaults]:
        if default and not _are_known(free_names(default), module):
            raise UsageError(
                f"the default {ast.unparse(default)} of its constructor names what cannot be"
                " imported"
            )


def _are_known(names: set[str], module: str) -> bool:
    try:
        list(imports_of(names, module))
    except UsageError:
        return False
    return True


def _names_of(arguments: ast.arguments) -> set[str]:
    defaults = [*arguments.defaults, *arguments.kw_defaults]
    names = {name for node in defaults if node for name in free_names(node)}
    return names.union(*(free_names(one) for one in _all(arguments)))


def _all(arguments: ast.arguments) -> list[ast.arg]:
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [one for one in (arguments.vararg, arguments.kwarg) if one]


def _handed_on(arguments: ast.arguments) -> Iterator[str]:
    for one in [*arguments.posonlyargs, *arguments.args][1:]:
        yield one.arg
    if arguments.vararg:
        yield f"*{arguments.vararg.arg}"
    for one in arguments.kwonlyargs:
        yield f"{one.arg}={one.arg}"
    if arguments.kwarg:
        yield f"**{arguments.kwarg.arg}"
