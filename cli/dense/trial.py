"""One run of a dense class divided in some way, on a group of two ranks that is make-believe.

The engine itself says what it can do with a shard: every operation of the carried methods is
tried as it is, then as one of the products, then with its shards gathered. What was done
where is the result. Values mean nothing here; shapes and marks do.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torchshard as ts
from torch import Tensor, nn
from torchshard.distributed import ops
from torchshard.distributed.moves import move
from torchshard.tensor import whole, whole_shape

from . import products
from .carry import Change, Place, operands, place_of
from .sample import Sample, tensors_in
from .source import Method, is_code

SIZE = 2
Shapes: TypeAlias = "dict[tuple[str, Place], list[torch.Size | None]]"


class Rejected(Exception):
    """The class cannot be divided in that way; the text says why."""


@dataclass(frozen=True)
class Division:
    """How a class is divided.

    Attributes:
        modules: For each submodule of torch.nn that is divided, by path, the split.
        parameters: For each parameter of its own that is divided, the dim.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """What a trial found.

    Attributes:
        changes: For each method, what is done to the operations at those places.
        num_collectives: How many the forwards and their backwards take, all samples together.
        num_results: How many tensors the operations gave.
        num_shards: How many of those were shards.
        gathered: The parameters of its own that are gathered before they are used.
        storages: Where the shards of those lie in memory.
        shapes: What each operation gave, in turn: the whole shapes.
    """

    changes: dict[str, dict[Place, Change]] = field(default_factory=dict)
    num_collectives: int = 0
    num_results: int = 0
    num_shards: int = 0
    gathered: set[str] = field(default_factory=set)
    storages: dict[str, int] = field(default_factory=dict)
    shapes: Shapes = field(default_factory=dict)

    def note(self, result: Any) -> Any:
        """Count the result of an operation, and return it."""
        self.num_results += isinstance(result, Tensor)
        self.num_shards += isinstance(result, ts.ShardedTensor)
        return result


@contextmanager
def make_believe_group() -> Iterator[ts.ShardGroup]:
    """Be rank 0 of two, of which the other does not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=store)
    try:
        yield ts.ShardGroup(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def try_out(
    owner: type[nn.Module],
    methods: Sequence[Method],
    samples: Sequence[Sample],
    division: Division,
    group: ts.ShardGroup,
    expected: Shapes | None = None,
) -> Outcome:
    """Run every sample, divided so.

    Args:
        owner: The dense class.
        methods: Those to carry over.
        samples: How it is built and called.
        division: What is divided, and how.
        group: The group of two.
        expected: The shapes that a trial without any division gave. An operation that gives
            another one has lost the mark of a shard.

    Raises:
        Rejected: If it does not run, or its output has not the shape of the dense one.
    """
    outcome = Outcome({method.name: {} for method in methods})
    kind = _trial_class(owner, methods, division, outcome, expected or {})
    for sample in samples:
        try:
            with _counted(outcome):
                _run(kind, owner, sample, division, group, outcome)
        except Rejected:
            raise
        except Exception as error:  # anything can go wrong in a person's code
            raise Rejected(str(error)) from error
    return outcome


def _run(
    kind: type[ts.ParallelLayer],
    owner: type[nn.Module],
    sample: Sample,
    division: Division,
    group: ts.ShardGroup,
    outcome: Outcome,
) -> None:
    expected = tensors_in(sample.build(owner)(*sample.draw()))
    layer = _built(kind, sample.build(owner), division, group)
    outcome.storages = {
        name: layer.tensor_of(name).untyped_storage().data_ptr() for name in layer.specs
    }
    output = tensors_in(layer(*sample.draw()))
    mine, theirs = map(whole_shape, output), map(whole_shape, expected)
    if list(mine) != list(theirs):
        raise Rejected("the output has another shape than the dense one")


def _built(
    kind: Any,
    dense: nn.Module,
    division: Division,
    group: ts.ShardGroup,
) -> ts.ParallelLayer:
    """What the generated constructor builds."""
    present = {
        path: split for path, split in division.modules.items() if _has(dense, path)
    }
    ts.parallelize(dense, present, group=group)
    for path in present:
        _guard(dense.get_submodule(path))
    layer: ts.ParallelLayer = kind(group)
    held = [*dense._parameters, *dense._buffers, *dense._modules]
    for name, value in vars(dense).items():
        if not name.startswith("_") and name != "training":
            layer.__dict__[name] = value
    for name in kind.class_values:
        layer.__dict__.setdefault(name, getattr(dense, name))
    for name in held:
        if name not in division.parameters:
            setattr(layer, name, getattr(dense, name))
    specs = {
        name: _spec(getattr(dense, name), name, dim)
        for name, dim in division.parameters.items()
        if name in held
    }
    axes = {
        name: ts.Axis(spec.shape[division.parameters[name]])
        for name, spec in specs.items()
        if spec is not None
    }
    layer.declare(axes=axes, parameters=specs, inputs={}, output=ts.Whole())
    return layer


def _has(dense: nn.Module, path: str) -> bool:
    return any(name == path for name, _ in dense.named_modules())


def _spec(tensor: Tensor | None, name: str, dim: int) -> ts.ParameterSpec | None:
    if tensor is None:
        return None
    return ts.ParameterSpec(
        tuple(tensor.shape), ts.Shard(dim, name), ts.Given(tensor.detach())
    )


def _guard(layer: nn.Module) -> None:
    """Refuse whoever reads the shards of a divided layer from outside."""
    kind = type(layer)
    depth = 0

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        depth += 1
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            depth -= 1

    def read(self: Any, name: str) -> Any:
        if name in self._parameters and not depth and self.ranges_of(name) is not None:
            raise Rejected(f"its {name} is read by other code")
        return kind.__getattr__(self, name)

    layer.__class__ = type(
        kind.__name__, (kind,), {"forward": forward, "__getattr__": read}
    )


_BOTH_WAYS = ("all_gather", "reduce_scatter", "all_to_all")


@contextmanager
def _counted(outcome: Outcome) -> Iterator[None]:
    def counting(name: str, *args: Any) -> Tensor:
        outcome.num_collectives += 2 if name in _BOTH_WAYS else 1
        return move(name, *args)

    ops.move = counting  # type: ignore[assignment,attr-defined]  # imported there
    try:
        yield
    finally:
        ops.move = move  # type: ignore[attr-defined]  # as above


def _class_values(owner: type[nn.Module]) -> set[str]:
    """The attributes of the class itself that are no code, `nn.Module`'s own left out."""
    names = {name for base in owner.__mro__ for name in vars(base)} - set(
        dir(nn.Module)
    )
    return {name for name in names if not is_code(owner, name)}


def _trial_class(
    owner: type[nn.Module],
    methods: Sequence[Method],
    division: Division,
    outcome: Outcome,
    expected: Shapes,
) -> type[ts.ParallelLayer]:
    """A layer whose operations all pass through `_Sites`."""
    names = {name for method in methods for name in method.own_reads}
    values = {name for name in names if name in _class_values(owner)}
    members: dict[str, Any] = {"class_values": values}
    for method in methods:
        sites = _Sites(outcome, method, expected)
        tree = _Instrumented(method, division.parameters).visit(
            ast.parse(method.text).body[0]
        )
        module = ast.fix_missing_locations(ast.Module([tree], []))
        scope = {**method.scope, "__site__": sites.run, "__own__": _own_shard}
        found: dict[str, Any] = {}
        exec(compile(module, f"<{method.name}>", "exec"), scope, found)
        name = "local_forward" if method.name == "forward" else method.name
        members[name] = found[method.name]
    return type("Trial", (ts.ParallelLayer,), members)


def _own_shard(layer: ts.ParallelLayer, name: str) -> Tensor | None:
    if layer.tensor_of(name) is None:
        return None
    spec = layer.specs[name]
    assert isinstance(spec.layout, ts.Shard)
    return ts.ShardedTensor.from_local(
        layer.tensor_of(name),
        spec.layout.dim,
        ranges=layer.ranges_of(name),
        group=layer.group,
    )


class _Instrumented(ast.NodeTransformer):
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


class _Sites:
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

    called.__name__ = name
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


def product_for(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> Change | None:
    """What computes the result of `function` from shards, if something here does."""
    name = getattr(function, "__name__", "")
    is_plain = all(isinstance(arg, _OPERAND | None) for arg in args)
    if name == "normalize" and is_plain:
        return _normalize(name, args, **named)
    find = _PRODUCTS.get(name)
    if find is None or not is_plain or not named.keys() <= _LOCAL_OPTIONS:
        return None
    return find(name, args)


_LOCAL_OPTIONS = {"padding", "stride", "dilation", "p"}
"""Keywords that do not touch the sharded dim."""


_OPERAND = Tensor | str | int | float


def _dim(value: Any) -> int | None:
    """The sharded dim, counted from the back; None for what is whole."""
    if isinstance(value, ts.ShardedTensor):
        return value.sharding.dim - value.dim()
    return None


def _linear(name: str, args: Sequence[Any]) -> Change | None:
    x, weight, *rest = args
    bias = rest[0] if rest else None
    if (_dim(x), _dim(weight)) == (-1, -1) and _dim(bias) is None:
        return Change("row_linear")
    is_column = (_dim(x), _dim(weight)) == (None, -2)
    if is_column and (bias is None or _dim(bias) == -1):
        return Change("on_shards", "F.linear", at=-1)
    return None


def _matmul(name: str, args: Sequence[Any]) -> Change | None:
    left, right = args
    if min(left.dim(), right.dim()) < 2:
        return None
    dims = (_dim(left), _dim(right))
    if dims == (None, -1):
        return Change("on_shards", "torch.matmul", at=-1)
    if dims == (-2, None):
        return Change("on_shards", "torch.matmul", at=-2)
    return Change("summed", "torch.matmul") if dims == (-1, -2) else None


def _einsum(name: str, args: Sequence[Any]) -> Change | None:
    equation, *tensors = args
    if not isinstance(equation, str) or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    letters = {
        term[_dim(one)] if _after_dots(term, one) else "."  # type: ignore[index]
        for term, one in zip(terms, tensors, strict=True)
        if _dim(one) is not None
    }
    if len(letters) != 1 or "." in letters:
        return None
    (letter,) = letters
    if any(
        letter in term and _dim(one) is None
        for term, one in zip(terms, tensors, strict=True)
    ):
        return None
    if letter not in output:
        return Change("summed", "torch.einsum")
    place = output.index(letter) - len(output)
    return (
        None
        if "..." in output[place:]
        else Change("on_shards", "torch.einsum", at=place)
    )


def _after_dots(term: str, value: Any) -> bool:
    """Whether the sharded dim of `value` has a letter that its place from the back finds."""
    dim = _dim(value)
    return dim is not None and -dim <= len(term.rpartition("...")[2])


def _cdist(name: str, args: Sequence[Any]) -> Change | None:
    is_column = len(args) == 2 and (_dim(args[0]), _dim(args[1])) == (None, -2)
    return Change("on_shards", "torch.cdist", at=-1) if is_column else None


def _embedding(name: str, args: Sequence[Any]) -> Change | None:
    if len(args) != 2 or _dim(args[0]) is not None:
        return None
    if _dim(args[1]) == -1:
        return Change("on_shards", "F.embedding", at=-1)
    return Change("embedding") if _dim(args[1]) == -2 else None


def _getitem(name: str, args: Sequence[Any]) -> Change | None:
    table, index = args
    is_index = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not is_index or not isinstance(table, ts.ShardedTensor):
        return None
    if table.sharding.dim == 0:
        return Change("lookup")
    return Change("on_shards", "operator.getitem", at=_dim(table))


def _bilinear(name: str, args: Sequence[Any]) -> Change | None:
    left, right, weight, *rest = args
    bias = rest[0] if rest else None
    is_column = (_dim(left), _dim(right), _dim(weight)) == (None, None, -3)
    is_column = is_column and (bias is None or _dim(bias) == -1)
    return Change("on_shards", "F.bilinear", at=-1) if is_column else None


def _conv(name: str, args: Sequence[Any]) -> Change | None:
    x, weight, *rest = args
    bias = rest[0] if rest else None
    groups = rest[4] if len(rest) > 4 else 1
    num_dims = int(name[-2])
    is_column = (_dim(x), _dim(weight)) == (None, -num_dims - 2) and groups == 1
    is_column = is_column and (bias is None or _dim(bias) == -1)
    return Change("on_shards", f"F.{name}", at=-num_dims - 1) if is_column else None


def _normalize(
    name: str, args: Sequence[Any], dim: Any = 1, **named: Any
) -> Change | None:
    x, dim = args[0], args[2] if len(args) > 2 else dim
    held = _dim(x)
    if held is None or not isinstance(dim, int) or dim % x.dim() == held % x.dim():
        return None
    return Change("on_shards", "F.normalize", at=held)


_PRODUCTS: dict[str, Callable[[str, Sequence[Any]], Change | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "cdist": _cdist,
    "embedding": _embedding,
    "getitem": _getitem,
    "bilinear": _bilinear,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
}
