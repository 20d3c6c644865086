"""The operations of a carried method, run one by one: what is done to each.

The engine itself says what it can do with a shard. Every operation is tried as it is, then as
one of the products, then with its shards gathered; what worked is noted.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torchshard as ts
from torch import Tensor
from torchshard.tensor import whole, whole_shape

from . import products
from .carry import Change, Place, operands, place_of
from .division import Outcome, Rejected, Shapes
from .rules import product_for
from .source import Method


class Instrumented(ast.NodeTransformer):
    """Every call, matrix product and index becomes a call of `__site__`."""

    def __init__(self, method: Method, shards: Mapping[str, int]) -> None:
        self.first = method.first_argument
        self.shards = shards

    def _site(self, node: ast.expr, values: Sequence[ast.expr], *rest: Any) -> ast.Call:
        names = [_constant(place_of(node)), *rest]
        return ast.Call(ast.Name("__site__", ast.Load()), [*names, *values], [])

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Leave the decorators and the signature as they are."""
        node.body = [self.visit(one) for one in node.body]
        node.returns = None
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """`f(a)` and `x.f(a)`."""
        place, func = place_of(node), node.func
        if isinstance(func, ast.Name) and func.id in ("super", "locals", "isinstance"):
            return self.generic_visit(node)
        if isinstance(func, ast.Attribute):
            subject, name = self.visit(func.value), ast.Constant(func.attr)
        else:
            subject, name = self.visit(func), ast.Constant(None)
        args = [self.visit(arg) for arg in node.args]
        keywords = [
            ast.keyword(one.arg, self.visit(one.value)) for one in node.keywords
        ]
        head = [_constant(place), ast.Constant("call"), subject, name]
        return ast.Call(ast.Name("__site__", ast.Load()), [*head, *args], keywords)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Leave an f-string alone: Python 3.11 does not say where its parts stand."""
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """`a @ b` and its kin."""
        left, right = self.visit(node.left), self.visit(node.right)
        return self._site(
            node,
            [left, right],
            ast.Constant("binary"),
            ast.Constant(_NAMES[type(node.op)]),
        )

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """`x[index]`, where it is read."""
        if not isinstance(node.ctx, ast.Load):
            return self.generic_visit(node)
        value = self.visit(node.value)
        index = _without_slices(self.visit(node.slice))
        return self._site(
            node, [value, index], ast.Constant("index"), ast.Constant(None)
        )

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """`self.weight`, where that is divided."""
        is_own = isinstance(node.value, ast.Name) and node.value.id == self.first
        if is_own and node.attr in self.shards and isinstance(node.ctx, ast.Load):
            name = ast.Name("__own__", ast.Load())
            return ast.Call(name, [node.value, ast.Constant(node.attr)], [])
        return self.generic_visit(node)


_NAMES = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
}


def _constant(place: Place) -> ast.Constant:
    """A place as code; the compiler takes a tuple for a constant, typeshed does not."""
    return ast.Constant(place)  # type: ignore[arg-type]


def _without_slices(index: ast.expr) -> ast.expr:
    """The index as an expression of its own: `slice(a, b)` for `a:b`."""
    if isinstance(index, ast.Slice):
        bounds = [index.lower, index.upper, index.step]
        filled = [bound or ast.Constant(None) for bound in bounds]
        return ast.Call(ast.Name("slice", ast.Load()), filled, [])
    if isinstance(index, ast.Tuple):
        return ast.Tuple([_without_slices(part) for part in index.elts], ast.Load())
    return index


class Sites:
    """The operations of one method: what is done to each."""

    def __init__(self, outcome: Outcome, method: Method, expected: Shapes) -> None:
        self.outcome = outcome
        self.name = method.name
        self.expected = expected
        self.changes = outcome.changes[method.name]
        self.nodes = {
            place_of(node): node
            for node in ast.walk(method.tree)
            if isinstance(node, ast.Call | ast.BinOp | ast.Subscript)
        }

    def run(
        self, place: Place, kind: str, subject: Any, name: Any, *args: Any, **named: Any
    ) -> Any:
        """Do the operation at `place`, changed if it has to be."""
        if kind == "binary":
            return self._tried(
                place, getattr(operator, subject), "", (name, *args), named
            )
        if kind == "index":
            return self._tried(place, operator.getitem, "", (name, *args), named)
        function = subject if name is None else getattr(subject, name)
        if isinstance(subject, Tensor):
            return self._tried(place, _method(name), name, (subject, *args), named)
        return self._tried(place, function, "", args, named)

    def _tried(
        self,
        place: Place,
        function: Callable[..., Any],
        method: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
    ) -> Any:
        change = self.changes.get(place)
        try:
            if change is None and _is_opaque(function) and _has_shard(args):
                raise ts.errors.ShardedOpError(f"{function} does not know of shards.")
            result = _done(change, function, method, args, named)
            return self._counted(place, result, args, change)
        except Rejected:
            raise
        except (
            Exception
        ) as error:  # of the engine, or of torch where a shard does not fit
            if not _has_shard([*args, *named.values()]):
                raise
            last = error
        for other in self._others(place, function, method, args, named, change):
            try:
                result = _done(other, function, method, args, named)
                result = self._counted(place, result, args, other)
            except Rejected:
                raise
            except Exception:  # the next one may do
                continue
            self.changes[place] = other
            return result
        raise Rejected(str(last)) from last

    def _counted(
        self, place: Place, result: Any, args: Sequence[Any], change: Change | None
    ) -> Any:
        """Note what the operation gave, and which parameters it gathered itself."""
        seen = self.outcome.shapes.setdefault((self.name, place), [])
        shape = whole_shape(result) if isinstance(result, Tensor) else None
        before = self.expected.get((self.name, place), [])
        if len(seen) < len(before) and before[len(seen)] != shape:
            raise ts.errors.ShapeError("The result is not the whole one's.")
        seen.append(shape)
        if change is not None and change.kind == "gather":
            for name, storage in self.outcome.storages.items():
                if any(_is_view(arg, storage) for arg in args):
                    self.outcome.gathered.add(name)
        return self.outcome.note(result)

    def _others(
        self,
        place: Place,
        function: Callable[..., Any],
        method: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        before: Change | None,
    ) -> Iterator[Change]:
        """What else can be done: a product, or shards gathered."""
        node = self.nodes[place]
        is_starred = isinstance(node, ast.Call) and (
            any(isinstance(arg, ast.Starred) for arg in node.args)
            or any(one.arg is None for one in node.keywords)
        )
        product = None if is_starred else product_for(function, args, named)
        if product and before in (None, product):
            yield _as_written(product, node, method)
        if is_starred:
            return
        names = [one for one, _ in operands(node)]
        if isinstance(node, ast.Call) and not method and names[:1] == ["object"]:
            names = names[1:]
        values = [*args, *named.values()]
        gathered = set(before.gathered if before and before.kind == "gather" else ())
        for one, value in zip(names, values, strict=False):
            if isinstance(value, ts.ShardedTensor):
                gathered.add(one)
            elif isinstance(value, list | tuple) and _has_shard([value]):
                gathered.add(f"{one}*")
        if before is None or before.kind == "gather":
            yield Change("gather", gathered=tuple(sorted(gathered, key=str)))


def _is_opaque(function: Any) -> bool:
    """Whether a function computes with the memory of its tensors, past their types."""
    if isinstance(function, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return True
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    owner = getattr(function, "__self__", None)
    return isinstance(owner, type) and issubclass(owner, torch.autograd.Function)


def _is_view(value: Any, storage: int) -> bool:
    """Whether `value` is a shard that views the memory at `storage`."""
    if not isinstance(value, ts.ShardedTensor):
        return False
    return value.to_local().untyped_storage().data_ptr() == storage


def _method(name: str) -> Callable[..., Any]:
    def called(subject: Tensor, *args: Any, **named: Any) -> Any:
        return getattr(subject, name)(*args, **named)

    called.__name__, called.__module__ = name, "torch"
    return called


def _done(
    change: Change | None,
    function: Callable[..., Any],
    method: str,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    if change is None:
        return function(*args, **named)
    if change.kind == "gather":
        places: list[int | str] = [*range(len(args)), *named]
        if method:
            places = ["object", *range(len(args) - 1), *named]
        values = [
            _gathered(value, place, change)
            for place, value in zip(places, [*args, *named.values()], strict=True)
        ]
        split = len(args)
        return function(
            *values[:split], **dict(zip(named, values[split:], strict=True))
        )
    product = getattr(products, change.kind)
    options = {} if change.at is None else {"at": change.at}
    if not change.function:
        return product(*args, **named, **options)
    plain = getattr(torch, method, function) if method else function
    return product(
        torch.matmul if plain is operator.matmul else plain, *args, **options
    )


def _gathered(value: Any, place: int | str, change: Change) -> Any:
    if place in change.gathered:
        return whole(value)
    if f"{place}*" in change.gathered:
        return [whole(part) for part in value]
    return value


def _has_shard(values: Sequence[Any]) -> bool:
    return any(
        isinstance(value, ts.ShardedTensor)
        or (isinstance(value, list | tuple) and _has_shard(value))
        for value in values
    )


def _as_written(change: Change, node: ast.expr, method: str) -> Change:
    """The change, with the function named as the source names it."""
    if not change.function or method or not isinstance(node, ast.Call):
        return change
    return replace(change, function=ast.unparse(node.func))
