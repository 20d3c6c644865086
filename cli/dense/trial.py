"""One run of a dense class divided in some way, on a group of ranks that is make-believe.

It is the generated layer that runs: what the engine has no rule for raises. Values mean
nothing here; shapes and marks do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torchshard as ts
from torch import Tensor, nn
from torch._functorch import eager_transforms, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torchshard.distributed import ops
from torchshard.distributed.moves import move
from torchshard.tensor import whole_shape

from .declaration import class_attributes
from .division import Division, Outcome, Rejected
from .sample import Sample, tensors_in
from .source import Method, function_of

_SIZES = (3, 2, 4)
"""Ranks that are tried; few sizes divide by three, so that what may be cut is cut first."""


@contextmanager
def make_believe_groups() -> Iterator[Sequence[ts.ShardGroup]]:
    """Be rank 0 of groups of several sizes, in which nobody else exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(_SIZES), store=FakeStore())
    try:
        yield [ts.ShardGroup(dist.new_group(list(range(size)))) for size in _SIZES]
    finally:
        dist.destroy_process_group()


def try_out(
    owner: type[nn.Module],
    methods: Sequence[Method],
    samples: Sequence[Sample],
    division: Division,
    group: ts.ShardGroup,
) -> Outcome:
    """Run every sample, divided so.

    Args:
        owner: The dense class.
        methods: Those to carry over.
        samples: How it is built and called.
        division: What is divided, and how.
        group: The ranks.

    Raises:
        Rejected: If it does not run, or its output has not the shape of the dense one.
    """
    outcome = Outcome()
    for sample in samples:
        try:
            layer = _built(owner, methods, sample, division, group)
            expected = tensors_in(sample.build(owner)(*sample.draw()))
            with ExitStack() as stack:
                for owner_and_name in _WITHOUT_MARKS:
                    stack.enter_context(_without_shards(*owner_and_name))
                stack.enter_context(_counted(outcome))
                stack.enter_context(_Watch(layer, outcome))
                output = tensors_in(layer(*sample.draw()))
        except Rejected:
            raise
        except Exception as error:  # anything can go wrong in a person's code
            raise Rejected(str(error)) from error
        if [*map(whole_shape, output)] != [*map(whole_shape, expected)]:
            raise Rejected("the output has another shape than the dense one")
    return outcome


def _built(
    owner: type[nn.Module],
    methods: Sequence[Method],
    sample: Sample,
    division: Division,
    group: ts.ShardGroup,
) -> ts.ParallelLayer:
    """What the generated constructor builds."""
    members = {
        "dense_forward" if one.name == "forward" else one.name: function_of(
            owner, one.name
        )
        for one in methods
    }
    kind: Callable[..., ts.MarkedLayer] = type("Trial", (ts.MarkedLayer,), members)
    layer, dense = kind(group), sample.build(owner)
    layer.take_over(dense, division.parameters)
    for name in class_attributes(owner, methods):
        setattr(layer, name, getattr(dense, name))
    ts.parallelize(layer, division.present(dense), group=group)
    return layer


class _Watch(TorchFunctionMode):
    """Sees the operations of a layer: counts results, and refuses what no rule would see.

    That is code which reads a shard as if it were the whole parameter, and code that computes
    with the memory of its tensors, past their types.
    """

    def __init__(self, layer: ts.ParallelLayer, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome
        self.depth = 0
        self.shards: dict[int, str] = {}
        for path, part in layer.named_modules():
            if isinstance(part, ts.ParallelLayer):
                self._guard(path, part)

    def _guard(self, path: str, layer: ts.ParallelLayer) -> None:
        for name in layer.specs:
            if layer.ranges_of(name) is not None:
                self.shards[id(layer.tensor_of(name))] = f"{path}.{name}".lstrip(".")
        if path:
            layer.register_forward_pre_hook(lambda *_: self._step(1))
            layer.register_forward_hook(lambda *_: self._step(-1))

    def _step(self, by: int) -> None:
        self.depth += by

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        values = (args, kwargs or {})
        if isinstance(func, _PAST_TYPES):
            _expect_no_shard(getattr(func, "__name__", str(func)), values)
        if not self.depth and func not in _HARMLESS:
            self._expect_marked(func, values)
        return self.outcome.note(func(*args, **(kwargs or {})))

    def _expect_marked(self, func: Callable[..., Any], values: Any) -> None:
        """Check that no shard is read but by its layer, and by the mark's own view of it."""
        read = [self.shards[id(v)] for v in tree_leaves(values) if id(v) in self.shards]
        is_mark = func is torch.Tensor.view_as and "." not in "".join(read)
        if read and not is_mark:
            raise Rejected(f"its {read[0]} is read as if it were whole")


def _expect_no_shard(name: str, values: Any) -> None:
    if any(isinstance(value, ts.ShardedTensor) for value in tree_leaves(values)):
        raise Rejected(f"{name} computes with shards past torch's functions")


@contextmanager
def _without_shards(owner: Any, name: str) -> Iterator[None]:
    """Refuse shards for a function that hands on tensors without their marks."""
    before = vars(owner)[name]
    function = getattr(before, "__func__", before)

    def checked(*args: Any, **named: Any) -> Any:
        _expect_no_shard(getattr(args[0], "__name__", name), (args, named))
        return function(*args, **named)

    setattr(owner, name, checked if function is before else classmethod(checked))
    try:
        yield
    finally:
        setattr(owner, name, before)


_WITHOUT_MARKS = (
    (torch.autograd.Function, "apply"),
    (vmap, "_create_batched_inputs"),
    (eager_transforms, "_wrap_all_tensors"),
)
"""Where a backward of one's own, torch.vmap and torch.func take their tensors."""
_PAST_TYPES = (
    torch.jit.ScriptFunction,
    torch._C.ScriptMethod,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
_HARMLESS = [torch.Tensor.dtype.__get__, torch.Tensor.device.__get__]  # type: ignore[attr-defined]
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
