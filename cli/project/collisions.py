"""A class name must not be one that the generated files use for something else."""

import ast
from collections.abc import Iterator, Mapping

from ..errors import UsageError
from ..naming.names import suggested_class
from .layer import Layer


def check_collisions(layer: Layer, texts: Mapping[str, str]) -> None:
    """Accept the class name of `layer` for its rendered files.

    In the module only its own class statement may bind the name, in any other file only
    the import from that module.

    Raises:
        UsageError: If something else binds it.
    """
    for path, text in texts.items():
        if not path.endswith(".py"):
            continue
        tree = ast.parse(text)
        own = _own_binding(tree, layer, is_module=path == layer.module_path)
        for node in ast.walk(tree):
            if node is not own and layer.class_name in _bound(node):
                raise UsageError(_message(layer.class_name, node, path))


def _own_binding(tree: ast.Module, layer: Layer, *, is_module: bool) -> ast.AST | None:
    """The one statement that may bind the class: the first of its kind."""
    for node in tree.body:
        if is_module and isinstance(node, ast.ClassDef):
            if node.name == layer.class_name:
                return node
        elif isinstance(node, ast.ImportFrom) and node.module == layer.import_path:
            for alias in node.names:
                if alias.name == layer.class_name:
                    return alias
    return None


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that `node` itself gives a meaning to."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.alias):
        yield node.asname or node.name.partition(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg


def _message(name: str, node: ast.AST, path: str) -> str:
    kinds = {ast.ClassDef: "a class", ast.alias: "an import", ast.Name: "a variable"}
    kind = kinds.get(type(node), "a function or an argument")
    other = suggested_class(name)
    remedy = f"use {other}" if other != name else "choose another name"
    return f"'{name}' is the name of {kind} in the generated {path}; {remedy}"
