"""What was read of a dense class, as plain JSON from which the template `dense` renders.

The lock keeps it, so that neither `check` nor `update` imports a person's module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torchshard as ts
from torch import nn
from torch.nn.utils import parametrize

from ..errors import UsageError
from . import carry, products, text
from .choice import Chosen, choose, parsed_shards
from .constructor import Constructor, read_constructor
from .declaration import attributes, axes, divided, first_dims, held, shard, typical
from .division import Division, Rejected
from .imports import OURS, PRODUCTS, imports, is_local, used_products
from .remarks import remarks
from .sample import Sample, find_samples
from .source import Method, carried_methods
from .trial import FIRST_SIZE, OTHER_SIZES, make_believe_group, try_out


@dataclass(frozen=True)
class _Found:
    """All that was read of a class; without `chosen`, `problem` says why."""

    owner: type[nn.Module]
    module: str
    constructor: Constructor
    samples: Sequence[Sample]
    methods: Sequence[Method]
    chosen: Chosen | None
    problem: str
    is_asked: bool


def read_dense(
    owner: type, module: str, shards: Sequence[str], arguments: str, inputs: str
) -> dict[str, Any]:
    """Read the class `owner`, which is imported from `module`.

    Args:
        owner: The class.
        module: Name of the module that the user named.
        shards: What `--shard` asks for, each `parameter=dim`.
        arguments: The constructor's arguments for a small one; empty to find some.
        inputs: Its inputs, likewise.

    Raises:
        UsageError: If it cannot be read, built or called; the text says what to do.
    """
    _expect_dense(owner)
    asked = parsed_shards(shards)
    constructor = read_constructor(owner)
    with _one_thread():
        return _read(owner, module, constructor, asked, (arguments, inputs))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute without threads, which cost more than small tensors take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read(
    owner: type[nn.Module],
    module: str,
    constructor: Constructor,
    asked: dict[str, int | None],
    given: tuple[str, str],
) -> dict[str, Any]:
    samples = find_samples(owner, *given)
    if not any(True for _ in samples[0].build(owner).parameters()):
        raise UsageError(
            f"{owner.__name__} has no parameters, so there is nothing to divide; it takes"
            " shards as it is, as far as torchshard has rules for what it calls"
        )
    methods, problem = _methods(owner)
    hidden = _module_problem(samples[0].build(owner))
    if hidden:
        methods, problem = [], hidden
    chosen = None
    if methods:
        try:
            chosen = _chosen(owner, methods, samples, asked)
        except Rejected as error:
            methods, problem = [], f"carried over, it does not run: {error}"
    return _as_json(
        _Found(
            owner, module, constructor, samples, methods, chosen, problem, bool(asked)
        )
    )


def _expect_dense(owner: type) -> None:
    if not issubclass(owner, nn.Module):
        raise UsageError(f"{owner.__name__} is not a subclass of torch.nn.Module")
    if issubclass(owner, ts.ParallelLayer):
        raise UsageError(f"{owner.__name__} is a sharded layer already")
    if issubclass(owner, nn.modules.lazy.LazyModuleMixin):
        raise UsageError(
            f"{owner.__name__} is lazy: its shapes are not known before it has run. Name the"
            " class that it becomes"
        )
    if owner.forward is nn.Module.forward:
        raise UsageError(f"{owner.__name__} has no forward to carry over")


def _methods(owner: type) -> tuple[list[Method], str]:
    """The methods to carry over; none, and why, if that cannot be done."""
    try:
        methods = carried_methods(owner, ts.ParallelLayer)
        for method in methods:
            _expect_carriable(method)
    except UsageError as error:
        return [], str(error)
    return methods, ""


def _expect_carriable(method: Method) -> None:
    names = {node.id for node in ast.walk(method.tree) if isinstance(node, ast.Name)}
    if "super" in names or "__class__" in names:
        raise UsageError(
            f"{method.name} calls super(), whose code does not know of shards; write out"
            " what it does"
        )
    bound = {
        node.id
        for node in ast.walk(method.tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    taken = bound & (set(OURS) | set(PRODUCTS))
    if taken:
        raise UsageError(
            f"{method.name} has a variable '{min(taken)}', which generated code uses for"
            " something else; give it another name"
        )
    clashes = (method.own_reads & _taken_names()) - {"training"}
    if clashes:
        raise UsageError(
            f"{method.name} reads self.{min(clashes)}, a name that ParallelLayer uses for"
            " something else; give it another name"
        )


def _taken_names() -> set[str]:
    """What ParallelLayer adds to nn.Module, as a class and in each layer."""
    in_layers = set(ts.ParallelLayer.__init__.__code__.co_names)
    return (set(dir(ts.ParallelLayer)) - set(dir(nn.Module))) | in_layers


def _module_problem(module: nn.Module) -> str:
    """Why the numbers of a module are not those of its forward alone."""
    hooks = [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    ]
    if hooks:
        return "its constructor registers hooks (as torch's weight_norm does)"
    if parametrize.is_parametrized(module):
        return "a parametrization computes its parameters"
    return ""


_OPAQUE = ("parameters", "named_parameters", "state_dict", "_parameters", "__dict__")


def _reads_all(methods: Iterable[Method]) -> bool:
    """Whether the code looks at the parameters of its own otherwise than by their names."""
    for method in methods:
        first = method.first_argument
        dotted = set()
        for node in ast.walk(method.tree):
            if isinstance(node, ast.Attribute):
                dotted.add(id(node.value))
                if node.attr in _OPAQUE:
                    return True
        for node in ast.walk(method.tree):
            is_self = isinstance(node, ast.Name) and node.id == first
            if is_self and id(node) not in dotted:
                return True
    return False


def _chosen(
    owner: type[nn.Module],
    methods: Sequence[Method],
    samples: Sequence[Sample],
    asked: dict[str, int | None],
) -> Chosen:
    module = samples[0].build(owner)
    with make_believe_group(FIRST_SIZE) as group:
        shapes = try_out(owner, methods, samples, Division(), group).shapes
        chosen = choose(
            module,
            asked,
            not _reads_all(methods),
            lambda division: try_out(owner, methods, samples, division, group, shapes),
        )
    for size in OTHER_SIZES:
        with make_believe_group(size) as group:
            try_out(
                owner, methods, samples, chosen.division, group, shapes, chosen.outcome
            )
    return chosen


def _as_json(found: _Found) -> dict[str, Any]:
    owner, samples, chosen = found.owner, found.samples, found.chosen
    modules = [sample.build(owner) for sample in samples]
    parameters = chosen.division.parameters if chosen else first_dims(modules[0])
    shards = [
        shard(name, dim, modules, found.constructor, samples[0])
        for name, dim in parameters.items()
    ]
    left = remarks(samples[0], modules[0], found.methods, chosen, found.problem)
    return {
        "attributes": attributes(modules, found.methods, parameters),
        "axes": list(axes(shards)),
        "dense": owner.__name__,
        "divided": divided(chosen),
        "held": list(held(modules[0], chosen, parameters)),
        "left": text.wrapped(left),
        "remarks": left,
        "rule": text.rule(is_asked=found.is_asked),
        "shards": shards,
        "typical": typical(shards),
        **_code(found, shards),
        **_test(found),
    }


def _code(found: _Found, shards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The code of the layer: its imports, its constructor's call, its methods."""
    name, constructor = found.owner.__name__, found.constructor
    texts = [text.stub(name, found.problem)]
    if found.chosen:
        texts = [_method_text(one, found.chosen, shards) for one in found.methods]
    used = used_products("\n".join(texts))
    lines = imports(
        found.owner, found.module, constructor, found.methods, texts, used, bool(shards)
    )
    taken = ["self", *constructor.parameters]
    return {
        "build": text.fitted(f"dense = {name}(", constructor.call, ")", 8),
        "imports": text.import_blocks(lines, is_local),
        "methods": texts,
        "products": text.sources(products, used),
        "signature": text.fitted("def __init__(", taken, ") -> None:", 4),
    }


def _test(found: _Found) -> dict[str, Any]:
    """The code of the test: what it compares with, and its cases."""
    fed = [value for sample in found.samples for value in sample.inputs]
    return {
        "cases": [text.case(found.owner.__name__, one) for one in found.samples],
        "inputs": sorted({type(value).__name__ for value in fed if _is_drawn(value)}),
        "is_local": is_local(found.module),
        "module": found.module,
    }


def _is_drawn(value: Any) -> bool:
    return type(value).__name__ in ("Floats", "Integers")


def _method_text(
    method: Method, chosen: Chosen, shards: Sequence[dict[str, Any]]
) -> str:
    """A method as it is carried over, formatted where ruff is installed."""
    reads = [one for one in shards if one["name"] in method.own_reads]
    changes = chosen.outcome.changes[method.name]
    changed = carry.changed(method, changes, [one["name"] for one in reads])
    lines = [
        text.own_shard(carry.local_name(method, one["name"]), one) for one in reads
    ]
    return text.method(changed, lines)
