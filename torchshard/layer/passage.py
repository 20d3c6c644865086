"""The passage of activations: into the layouts that a layer declared, and out again.

All inputs are checked before the first is moved, since a move may be a collective, and by
facts that are the same on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor
from torchshard.distributed import ops
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import LayoutError, ShapeError
from torchshard.layout import Axis, Layout, Partial, Ranges, Shard, Whole, ranges_of
from torchshard.tensor import (
    ShardedTensor,
    Sharding,
    mark,
    recalled,
    whole,
    whole_shape,
)

Outputs: TypeAlias = "Layout | tuple[Layout, ...]"


@dataclass(frozen=True)
class Place:
    """A declared layout, with who holds what of its sharded dim, worked out once."""

    layout: Layout
    ranges: Ranges | None

    @property
    def dim(self) -> int | None:
        """The dim that the layout is about, counted as torch counts dims."""
        return None if isinstance(self.layout, Partial) else self.layout.dim

    @property
    def size(self) -> int | None:
        """The size that the layout asks for, if it asks for one."""
        if self.ranges is not None:
            return self.ranges.size
        return self.layout.size if isinstance(self.layout, Whole) else None


class Passage:
    """What a layer's forward does before and after its own computation.

    Args:
        kind: Name of the layer's class, for errors.
        group: The ranks.
        axes: The layer's axes; without any, all ranks compute the same.
        inputs: Layout of each tensor argument.
        output: Layout of what is computed, or one for each of a tuple.
        gather_output: Whether callers get sharded outputs whole.
    """

    def __init__(
        self,
        kind: str,
        group: ShardGroup,
        axes: Mapping[str, Axis],
        inputs: Mapping[str, Layout],
        output: Outputs,
        gather_output: bool,
    ) -> None:
        def place(layout: Layout) -> Place:
            if not isinstance(layout, Shard):
                return Place(layout, None)
            return Place(layout, ranges_of(layout.segments, axes, group.size))

        self.kind, self.group = kind, group
        self.names = list(inputs)
        self.inputs = {name: place(layout) for name, layout in inputs.items()}
        outputs = output if isinstance(output, tuple) else (output,)
        self.outputs = tuple(place(layout) for layout in outputs)
        self.returns_tuple = isinstance(output, tuple)
        self.gather_output = gather_output
        # Where all ranks compute the same, a gradient is whole and must not be summed.
        self.is_spread = bool(axes) and group.size > 1

    def expect_arguments_of(self, function: Callable[..., Any]) -> None:
        """Check that inputs given by position and by keyword find the same layout.

        Raises:
            LayoutError: If the inputs are not the first arguments of `function`.
        """
        for name, place in self.inputs.items():
            if isinstance(place.layout, Partial):
                raise LayoutError(
                    f"{name} is declared as Partial. Expected Whole, or a Shard; a partial"
                    " is reduced before it is passed on."
                )
        kinds = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        parameters = inspect.signature(function).parameters.values()
        taken = [one.name for one in parameters if one.kind in kinds]
        if self.names != taken[: len(self.names)]:
            raise LayoutError(
                f"inputs declares {self.names}, but local_forward of {self.kind} takes"
                f" {taken}. Expected the names of its first arguments, in their order."
            )

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], gather_batch: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the inputs in their layouts.

        Raises:
            LayoutError: If a batch is to be pooled and no input is declared.
            ShapeError: If an input does not fit its layout.
        """
        names = self.names
        if gather_batch and not names:
            raise LayoutError(
                f"{self.kind} has gather_batch=True, but declares no inputs that"
                " could be pooled. Pool them before the layer with"
                " torchshard.distributed.enter_model_parallel."
            )
        given = dict(zip(names, args, strict=False))
        given |= {name: kwargs[name] for name in names[len(args) :] if name in kwargs}
        given = {name: recalled(x) for name, x in given.items()}
        for name, x in given.items():
            if isinstance(x, Tensor):
                self._expect_fit(name, x, self.inputs[name])
        moved = self._moved(given, gather_batch)
        args = (*(moved.pop(name) for name in names[: len(args)]), *args[len(names) :])
        return args, {**kwargs, **moved}

    def _moved(self, given: dict[str, Any], gather_batch: bool) -> dict[str, Any]:
        """Return the inputs in their layouts; a tensor given twice is moved once."""
        moved: dict[str, Any] = {}
        for name, x in given.items():
            place = self.inputs[name]
            for earlier in moved:
                if given[earlier] is x and self.inputs[earlier] == place:
                    moved[name] = moved[earlier]
                    break
            else:
                moved[name] = self._entered(name, x, place, gather_batch)
        return moved

    def _entered(self, name: str, x: Any, place: Place, gather_batch: bool) -> Any:
        if not isinstance(x, Tensor):
            return x
        if gather_batch and not isinstance(x, ShardedTensor):
            is_summed = place.ranges is None and self.is_spread
            x = ops.enter_model_parallel(
                x, grad="shards" if is_summed else "whole", group=self.group
            )
            if is_summed:  # the reduce-scatter has summed what `copy` would sum
                return x
        if isinstance(place.layout, Shard):
            if isinstance(x, ShardedTensor):
                return x.to_local()
            dim = place.layout.dim % x.dim()
            return ops.scatter(x, dim, ranges=place.ranges, group=self.group)
        if isinstance(x, ShardedTensor):
            return whole(x, "shards" if self.is_spread else "whole")
        if not self.is_spread:
            return x
        return ops.enter(x, self.group)

    def _expect_fit(self, name: str, x: Tensor, place: Place) -> None:
        self._expect_size(name, x, place)
        if not isinstance(x, ShardedTensor):
            return
        held = x.sharding
        if isinstance(place.layout, Shard) and place.ranges is not None:
            dim = place.layout.dim % x.dim()
            if (held.dim, held.ranges) != (dim, place.ranges):
                raise ShapeError(
                    f"{name} is sharded on dim {held.dim} as {held.ranges.lengths};"
                    f" {self.kind} takes it sharded on dim {dim} as"
                    f" {place.ranges.lengths}. Pass"
                    f" torchshard.distributed.gather({name}), the whole tensor, and the"
                    " layer will take its part."
                )
        elif not self.is_spread:
            return
        if held.group != self.group:
            raise ShapeError(
                f"{name} is sharded over another group than that of {self.kind}. Pass"
                f" torchshard.distributed.gather({name}), the whole tensor."
            )

    def _expect_size(self, name: str, x: Tensor, place: Place) -> None:
        dim = place.dim
        if dim is None or place.size is None:
            return
        shape = whole_shape(x)
        fits = -len(shape) <= dim < len(shape)
        if not fits or shape[dim] != place.size:
            raise ShapeError(
                f"{name} has shape {tuple(shape)}; {self.kind} expects size"
                f" {place.size} in dim {dim}."
                + self._lost_mark(name, shape, dim, place)
            )

    def _lost_mark(
        self, name: str, shape: Sequence[int], dim: int, place: Place
    ) -> str:
        """Return the advice for a plain tensor that has the size of this rank's shard."""
        if place.ranges is None or not -len(shape) <= dim < len(shape):
            return ""
        if shape[dim] != place.ranges.length(self.group.rank):
            return ""
        return (
            f" Size {shape[dim]} is this rank's share: if {name} is a shard, mark it with"
            f" ShardedTensor.from_local({name}, dim={dim})."
        )

    def leave(self, output: Any) -> Any:
        """Return what the layer computed as its caller gets it.

        Raises:
            ShapeError: If an output declared as a shard does not have this rank's size.
        """
        if not self.returns_tuple:
            return self._left(output, self.outputs[0])
        pairs = zip(output, self.outputs, strict=True)
        return tuple(self._left(y, place) for y, place in pairs)

    def _left(self, output: Any, place: Place) -> Any:
        layout, ranges = place.layout, place.ranges
        if output is None or isinstance(layout, Whole):
            return output
        if isinstance(layout, Partial) or ranges is None:
            return ops.reduce(output, self.group)
        sharding = Sharding(layout.dim % output.dim(), ranges, self.group)
        if output.shape[sharding.dim] != sharding.length:
            raise ShapeError(
                f"local_forward of {self.kind} returned shape"
                f" {tuple(output.shape)}; its output is declared as a shard, of which rank"
                f" {self.group.rank} of {self.group.size} holds {sharding.length} in dim"
                f" {sharding.dim}."
            )
        marked = mark(output, sharding)
        return whole(marked) if self.gather_output else marked
