"""What was read of a dense class, as plain JSON from which the template `dense` renders.

The lock keeps it, so that neither `check` nor `update` imports a person's module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torchshard as ts
from torch import nn
from torch.nn.utils import parametrize

from ..errors import UsageError
from . import text
from .asked import parsed_shards, split_asked, ways_asked
from .choice import Chosen, choose
from .constructor import Constructor, read_constructor
from .declaration import constructor_text, first_dims, held
from .division import Rejected, items_of
from .imports import imports, is_local
from .remarks import remarks
from .sample import Sample, find_samples
from .source import Method, carried_methods
from .trial import make_believe_groups, try_out


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


def read_split(owner: type[nn.Module], shards: Sequence[str]) -> str:
    """The split of a class that has a finished layer, as `--shard` asks for it.

    Raises:
        UsageError: If none does what is asked for.
    """
    part = find_samples(owner, "", "")[0].build(owner)
    with make_believe_groups() as groups:
        return split_asked(part, parsed_shards(shards), groups[0])


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
    module_name: str,
    constructor: Constructor,
    asked: dict[str, int | None],
    given: tuple[str, str],
) -> dict[str, Any]:
    samples = find_samples(owner, *given)
    module = samples[0].build(owner)
    if not any(True for _ in module.parameters()):
        raise UsageError(
            f"{owner.__name__} has no parameters, so there is nothing to divide; it takes"
            " shards as it is, as far as torchshard has rules for what it calls"
        )
    methods, problem = _methods(owner)
    hidden = _module_problem(module)
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
            owner,
            module_name,
            constructor,
            samples,
            methods,
            chosen,
            problem,
            bool(asked),
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
        methods = carried_methods(owner, ts.MarkedLayer)
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
    clashes = (method.own_reads & _taken_names()) - {"training"}
    if clashes:
        raise UsageError(
            f"{method.name} reads self.{min(clashes)}, a name that MarkedLayer uses for"
            " something else; give it another name"
        )


def _taken_names() -> set[str]:
    """What a MarkedLayer has and an nn.Module has not."""
    kind = type("Empty", (ts.MarkedLayer,), {"dense_forward": nn.Module.forward})
    return set(dir(kind())) - set(dir(nn.Module()))


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


_READS_ALL = {"parameters", "named_parameters", "state_dict", "_parameters", "__dict__"}
"""What a forward may read of itself that hands out shards without their mark."""


def _chosen(
    owner: type[nn.Module],
    methods: Sequence[Method],
    samples: Sequence[Sample],
    asked: dict[str, int | None],
) -> Chosen:
    module = samples[0].build(owner)
    reads_all = any(method.own_reads & _READS_ALL for method in methods)
    items = items_of(module, own_allowed=not reads_all)
    with make_believe_groups() as groups:
        return choose(
            items,
            ways_asked(module, items, asked, groups[0]),
            groups,
            lambda division, group: try_out(owner, methods, samples, division, group),
        )


def _as_json(found: _Found) -> dict[str, Any]:
    owner, chosen, name = found.owner, found.chosen, found.owner.__name__
    modules = [sample.build(owner) for sample in found.samples]
    division = chosen.division if chosen else first_dims(modules[0])
    left = remarks(found.samples[0], modules[0], chosen, found.problem)
    constructor = constructor_text(
        name, found.constructor, division, modules, found.methods
    )
    methods = [text.method(method.text) for method in found.methods]
    lines = imports(owner, found.module, found.constructor, found.methods)
    return {
        "dense": name,
        "held": held(modules[0], division),
        "imports": text.import_blocks(lines, is_local),
        "left": text.wrapped(left),
        "methods": [
            text.method(constructor),
            *(methods or [text.stub(name, found.problem)]),
        ],
        "remarks": left,
        "is_asked": found.is_asked,
        **_test(found),
    }


def _test(found: _Found) -> dict[str, Any]:
    """The code of the test: what it compares with, and its cases."""
    fed = [value for sample in found.samples for value in sample.inputs]
    drawn = {type(value).__name__ for value in fed} & {"Floats", "Integers"}
    return {
        "cases": [text.case(found.owner.__name__, one) for one in found.samples],
        "inputs": sorted(drawn),
        "is_local": is_local(found.module),
        "module": found.module,
    }
