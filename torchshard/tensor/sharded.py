"""ShardedTensor: an activation that knows it is a shard.

The mark is part of the tensor's type, so no operation can drop it unseen: an operation
either has a rule, which says what it does to a sharded dim, or it raises. The rules live in
the sibling modules, one per kind of operation, and are looked up by the operation's name,
which `torch.f`, `Tensor.f` and `F.f` share.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torchshard.distributed import ops
from torchshard.distributed.groups import GroupLike, ShardGroup, resolve_group
from torchshard.distributed.transforms import (
    expect_asked,
    is_marked,
)
from torchshard.errors import ShapeError, ShardedOpError
from torchshard.layout import Ranges
from torchshard.tensor.compiler import compiler_looks, take_marked_inputs, uncompiled
from torchshard.tensor.composed import python_code
from torchshard.tensor.module_hooks import mark_gradients_for_hooks
from torchshard.tensor.recomputation import keep_marks_of_inputs
from torchshard.tensor.sameness import expect_same_operands

if TYPE_CHECKING:
    from types import FrameType


@dataclass(frozen=True)
class Sharding:
    """How a tensor is spread: which dim, who holds what of it, over which ranks.

    Attributes:
        dim: The sharded dim, counted from the front.
        ranges: Who holds which indices of the dim.
        group: The ranks.
    """

    dim: int
    ranges: Ranges
    group: ShardGroup

    @property
    def length(self) -> int:
        """Number of indices that this rank holds."""
        return self.ranges.length(self.group.rank)

    def at(self, dim: int) -> Sharding:
        """Return the same split of another dim."""
        return Sharding(dim, self.ranges, self.group)

    def held(self, ranges: Ranges) -> Sharding:
        """Return the split of the same dim into other ranges."""
        return Sharding(self.dim, ranges, self.group)


# A rule works on `x.to_local()` and calls other rules by name: where a compiled graph is
# traced, an operation on the marked tensor inside a rule would see the shard alone.
Rule: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}
ANSWERS_FIRST: set[type] = set()
"""Classes that turn themselves into a `ShardedTensor` before its rules are asked."""


def rule(names: Iterable[str]) -> Callable[[Rule], Rule]:
    """Register a function as the rule of the operations of the given names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


class ShardedTensor(torch.Tensor):
    """This rank's shard of an activation, marked with where it belongs.

    Column-parallel layers return it and row-parallel layers take it. It behaves as the whole
    tensor would: `shape` and `size()` are those of the whole, elementwise functions keep
    the mark, softmax, sum, mean, max, argmax, topk, norm and cross-entropy over the
    sharded dim compute the result of the whole tensor, and views name whole sizes. What
    would mix the sharded dim without a rule raises `ShardedOpError`.

    Only the shard is stored. In a group of one, layers return plain tensors.

    Attributes:
        sharding: The sharded dim, who holds what of it, and the group.
    """

    sharding: Sharding

    @staticmethod
    def from_local(
        x: Tensor,
        dim: int = -1,
        *,
        ranges: Ranges | None = None,
        group: GroupLike = None,
    ) -> Tensor:
        """Mark the plain tensor `x` as this rank's shard along `dim`.

        Args:
            x: This rank's part. Cut along dim 0 from a tensor that requires grad, it comes
                from `scatter(whole, 0, grad="whole")`: without `grad`, that is a batch.
            dim: The sharded dim.
            ranges: Who holds what; by default the sizes are exchanged in one all-gather.
            group: The ranks; None is the model group.

        Returns:
            The marked tensor; `x` itself in a group of one.

        Raises:
            ShapeError: If `x` does not have this rank's size of `ranges`.
        """
        group = resolve_group(group)
        if group.size == 1:
            return x
        let_torch_take_marks()
        ranges = ranges or ops.exchanged_ranges(x, dim, group)
        sharding = Sharding(dim % x.dim(), ranges, group)
        if x.shape[dim] != sharding.length:
            raise ShapeError(
                f"x has size {x.shape[dim]} in dim {dim}; rank {group.rank} of"
                f" {group.size} holds {sharding.length} of its {ranges.size} indices."
            )
        return mark(x, sharding)

    def to_local(self) -> Tensor:
        """Return the shard as a plain tensor. The caller now minds who holds what."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.view_as(self)

    def gather(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the whole tensor, as `torchshard.distributed.gather(x)` does.

        With arguments it is torch's own `gather(dim, index)`, along a dim that is whole.
        """
        if args or kwargs:
            return super().gather(*args, **kwargs)
        return whole(self)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            return compiled_call(func, args, kwargs or {})
        if compiler_looks():
            return local_call(func, args, kwargs or {})
        if any(kind in ANSWERS_FIRST for kind in types):
            return NotImplemented
        name = func.__name__
        expect_asked(name)
        function = RULES.get(name)
        if function is None:
            return _by_steps(func, args, kwargs or {})
        args, named = _torch_names(args, kwargs or {})
        if named.pop("out", None) is not None:
            sharding = first_sharded([*args, *named.values()]).sharding
            raise mixes(name, sharding, "has no rule for out=")
        expect_same_operands(func, args, named)
        return function(func, args, named)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        sharding = self.sharding
        return (
            f"ShardedTensor({self.to_local()!r}, dim={sharding.dim},"
            f" whole_size={sharding.ranges.size}, rank={sharding.group.rank},"
            f" size={sharding.group.size})"
        )


uncompiled(ShardedTensor)


def compiled_call(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation of a compiled graph, which was traced on the shards themselves.

    On plain tensors: on a graph's first run torch 2.13 has a check that knows no subclass.

    Raises:
        ShardedOpError: If no graph calls it: an operator of torch.library has no rule.
    """
    if not torch.compiler.is_compiling() and not _is_called_by_a_graph():
        given = tree_leaves((args, kwargs))
        sharding = next(x.sharding for x in given if is_marked(x))
        raise mixes(
            str(func), sharding, "is an operator of torch.library, without a rule"
        )
    return func(*tree_map(local, args), **tree_map(local, kwargs))


_OPERATOR_MODULES = frozenset(["torch._ops", "torch._library.custom_ops", __name__])


def _is_called_by_a_graph() -> bool:
    """Return whether compiled code, torch itself or a dispatch mode called the operator.

    A mode, which counts or logs, hands on what it was given.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _OPERATOR_MODULES and not name.endswith(".tensor.parameter"):
            code = frame.f_code
            is_graph = code.co_filename.startswith("<eval_with_key>")
            is_graph |= code.co_name == "__torch_dispatch__"
            is_own = name.split(".")[0] in ("torch", "torchshard", "")
            return is_graph or (is_own and not name.startswith("torch.testing."))
        frame = frame.f_back
    return False


def let_torch_take_marks() -> None:
    """Have graphs, checkpoints and backward hooks take marks, until the group is destroyed."""
    take_marked_inputs()
    keep_marks_of_inputs()
    mark_gradients_for_hooks()


def is_in_backward() -> bool:
    """Return whether this thread runs a backward, and with it a checkpoint's forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def mark(x: Tensor, sharding: Sharding) -> Tensor:
    """Return the plain local tensor `x` as a `ShardedTensor`; plain in a group of one."""
    if sharding.group.size == 1:
        return x
    shard = x.as_subclass(ShardedTensor)
    shard.sharding = sharding
    return shard


def recalled(x: Any) -> Any:
    """Return `x` marked if it is what `torchshard.distributed.scatter` cut along the last dim."""
    if type(x) is not Tensor:
        return x
    place = ops.scattered_as(x)
    return x if place is None else mark(x, Sharding(*place))


def whole(x: Tensor, grad: ops.GatherGrad = "whole") -> Tensor:
    """Return the whole tensor that the shard `x` belongs to; a plain tensor as it is."""
    if not isinstance(x, ShardedTensor):
        return x
    sharding = x.sharding
    return ops.gather(
        x.to_local(),
        sharding.dim,
        grad=grad,
        ranges=sharding.ranges,
        group=sharding.group,
    )


def local_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call `func` on the shards themselves."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def first_sharded(args: Iterable[Any]) -> ShardedTensor:
    """Return the first `ShardedTensor` among `args` and the sequences in it."""
    for value in args:
        if isinstance(value, ShardedTensor):
            return value
        if isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, ShardedTensor):
                    return item
    raise ShardedOpError("No sharded tensor was given by position; pass it so.")


def whole_shape(x: Tensor) -> torch.Size:
    """Return the shape of the whole tensor that `x`, shard or plain, belongs to."""
    with torch._C.DisableTorchFunctionSubclass():
        sizes = list(x.shape)
    if isinstance(x, ShardedTensor):
        sizes[x.sharding.dim] = x.sharding.ranges.size
    return torch.Size(sizes)


def mixes(name: str, sharding: Sharding, why: str = "") -> ShardedOpError:
    """Return the error of an operation that would mix the sharded dim, with the remedy."""
    reason = why or "would mix it"
    return ShardedOpError(
        f"{name}: dim {sharding.dim} of this tensor, {sharding.ranges.size} indices, is"
        f" spread over {sharding.group.size} ranks, and {name} {reason}. Call"
        " torchshard.distributed.gather(x) first for the whole tensor, or"
        " x.to_local() to work on this rank's shard alone."
    )


def _by_steps(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the Python code of a function that has no rule, whose steps may have theirs."""
    code = python_code(func)
    if code is None or torch.compiler.is_compiling():
        sharding = first_sharded([*args, *kwargs.values()]).sharding
        raise mixes(func.__name__, sharding, "has no rule for sharded tensors")
    return code(*args, **kwargs)


_NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x2": "other"}


def _torch_names(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as the rules read them: torch's names, and `input` in front."""
    named = {_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()}
    if not args and "input" in named:
        args = (named.pop("input"),)
    return args, named


def bound(values: Sequence[Any], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """Return the arguments named in `defaults`, given by position, by name or not at all."""
    given = dict(zip(defaults, values, strict=False))
    return [(defaults | given | kwargs)[name] for name in defaults]


def wrapped_dim(x: Tensor, dim: int) -> int:
    """Return `dim` of `x` counted from the front; torch's own IndexError if it has none."""
    with torch._C.DisableTorchFunctionSubclass():
        x.size(dim)
    return dim % x.dim()


def expect_first(name: str, x: Any, args: Iterable[Any]) -> None:
    """Check that the tensor that `name` works on is the shard, and not another argument.

    Raises:
        ShardedOpError: If `x` is plain.
    """
    if not isinstance(x, ShardedTensor):
        raise mixes(
            name,
            first_sharded(args).sharding,
            "on a plain tensor beside it has no rule",
        )


def local(value: Any) -> Any:
    """Return a marked tensor, or a parameter that is a shard, as the plain shard."""
    return value.to_local() if is_marked(value) else value


def asked(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `func` in a rule: by the rule of its name if an argument is marked."""
    given = tree_leaves((args, kwargs))
    if any(isinstance(value, ShardedTensor) for value in given):
        return RULES[func.__name__](func, args, kwargs)
    return func(*args, **kwargs)
