"""One run of a dense class divided in some way, on a group of ranks that is make-believe.

Values mean nothing here; shapes and marks do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torchshard as ts
from torch import Tensor, nn
from torchshard.distributed import ops
from torchshard.distributed.moves import move
from torchshard.tensor import whole_shape

from .division import Division, Outcome, Rejected, Shapes
from .sample import Sample, tensors_in
from .sites import Instrumented, Sites
from .source import Method, is_code

FIRST_SIZE = 3
"""Ranks in the trials that choose: few sizes divide by three, so that what may be cut is."""
OTHER_SIZES = (2, 4)
"""Ranks on which what was chosen must work too."""


@contextmanager
def make_believe_group(size: int) -> Iterator[ts.ShardGroup]:
    """Be rank 0 of `size`, of which the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()
    dist.init_process_group("fake", rank=0, world_size=size, store=store)
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
    outcome: Outcome | None = None,
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
        outcome: That of a trial on another number of ranks, to which this one adds.

    Raises:
        Rejected: If it does not run, or its output has not the shape of the dense one.
    """
    outcome = outcome or Outcome({method.name: {} for method in methods})
    outcome.shapes = {}
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
        if name in dense._parameters and name not in division.parameters:
            layer.adopt(name, getattr(dense, name))
        elif name not in division.parameters:
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
        sites = Sites(outcome, method, expected)
        tree = Instrumented(method, division.parameters).visit(
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
