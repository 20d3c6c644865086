"""ParallelLayer: a layer that declares how it is sharded and computes on its own shard.

A layer declares its axes, its parameters, and the layouts of its inputs and output. From
that the base class cuts the parameters, initialises them as torch.nn does, moves activations
in and out, checks sizes before the first collective, and loads whole or local state. What the
layer writes itself is `local_forward`, in plain torch, and `finish`, for what comes after the
reduce.

The declarations live on the module, keyed by parameter name; the parameters are plain local
`nn.Parameter`s.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor, nn
from torchshard import data_parallel, optimizer_checks, owners
from torchshard.distributed import collectives, ops
from torchshard.distributed.groups import GroupLike, resolve_group
from torchshard.errors import GroupError, LayoutError, ShapeError, StateError
from torchshard.initializer import Initializer, Part
from torchshard.layout import (
    Axis,
    Layout,
    Partial,
    Ranges,
    Shard,
    Split,
    Whole,
    ranges_of,
)
from torchshard.tensor import ShardedTensor, Sharding, mark, whole, whole_shape

if TYPE_CHECKING:
    from typing_extensions import Self

Outputs: TypeAlias = "Layout | tuple[Layout, ...]"


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter or buffer of a layer.

    Args:
        shape: Shape of the whole tensor.
        layout: `Whole()`, or `Shard(dim, segments)`.
        init: Its initialiser, which sees the fans of the whole tensor.
    """

    shape: tuple[int, ...]
    layout: Whole | Shard
    init: Initializer


class ParallelLayer(nn.Module, ABC):
    """Base of every sharded layer.

    A subclass calls `super().__init__(group)`, sets its fields, and ends its constructor with
    `self.declare(...)`. It implements `local_forward` and, if something follows the reduce,
    `finish`.

    Args:
        group: The ranks that share the layer; None is the model group of
            `torchshard.distributed.init_process_group`, a group of one before that.

    Attributes:
        group: The `ShardGroup`, with `size` and `rank`.
        gather_batch: Whether the ranks' inputs are their own samples, under data parallelism,
            which the layer pools along dim 0 before it computes
            (`torchshard.distributed.enter_model_parallel`).

    Example:
        >>> import torch
        >>> import torchshard as ts
        >>> class ParallelScale(ts.ParallelLayer):
        ...     def __init__(self, features, *, group=None):
        ...         super().__init__(group)
        ...         self.declare(
        ...             axes={"features": ts.Axis(features)},
        ...             parameters={
        ...                 "weight": ts.ParameterSpec(
        ...                     (features,), ts.Shard(0, "features"), ts.Constant(1.0)
        ...                 )
        ...             },
        ...             inputs={"input": ts.Shard(-1, "features")},
        ...             output=ts.Shard(-1, "features"),
        ...         )
        ...
        ...     def local_forward(self, input):
        ...         return input * self.weight
        >>> ParallelScale(6)(torch.ones(2, 6)).shape
        torch.Size([2, 6])
    """

    dense_class: ClassVar[type[nn.Module] | None] = None
    """The torch.nn class that the layer equals, for conversion; None if there is none."""

    splits: ClassVar[Mapping[str, Split]] = {}
    """How the class can be divided, by the words that a plan of `parallelize` uses."""

    def __init__(self, group: GroupLike = None) -> None:
        super().__init__()
        self.group = resolve_group(group)
        self._takes_model_group = group is None
        self._axes: dict[str, Axis] = {}
        self._specs: dict[str, ParameterSpec] = {}
        self._inputs: dict[str, Layout] = {}
        self._output: Outputs = Whole()
        self._gather_output = False
        self.gather_batch = False

    def declare(
        self,
        *,
        axes: Mapping[str, Axis],
        parameters: Mapping[str, ParameterSpec | None],
        inputs: Mapping[str, Layout],
        output: Outputs,
        buffers: Mapping[str, ParameterSpec | None] | None = None,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Cut, allocate and initialise the parameters. Called once, at the constructor's end.

        Args:
            axes: The index sets that are divided over the ranks.
            parameters: By name, in the order in which torch.nn draws them. A dotted name
                (`"out_proj.weight"`) makes the submodule; None registers an absent one.
            inputs: Layout of each tensor argument of `local_forward`, in its order. Other
                arguments pass through.
            output: Layout of what `local_forward` returns, or one for each of a tuple.
            buffers: As `parameters`, for state that is not trained.
            gather_output: Whether callers get sharded outputs whole.
            device: As for torch.nn layers. On the meta device nothing is initialised.
            dtype: As for torch.nn layers.

        Raises:
            LayoutError: If a parameter's segments do not add up to its shape, or `inputs`
                does not name the first arguments of `local_forward`.
        """
        self._axes, self._inputs, self._output = dict(axes), dict(inputs), output
        self._gather_output = gather_output
        self._expect_inputs()
        buffers = buffers or {}
        for name, spec in [*parameters.items(), *buffers.items()]:
            tensor = (
                None if spec is None else self._allocated(name, spec, device, dtype)
            )
            self._register(name, tensor, is_buffer=name in buffers)
        self._remember_tensors()
        self.reset_parameters()
        self._specs = {
            name: replace(spec, init=spec.init.later)
            for name, spec in self._specs.items()
        }

    def _expect_inputs(self) -> None:
        """Check that inputs given by position and by keyword find the same layout."""
        for name, layout in self._inputs.items():
            if isinstance(layout, Partial):
                raise LayoutError(
                    f"{name} is declared as Partial. Expected Whole, or a Shard; a partial"
                    " is reduced before it is passed on."
                )
        taken = [
            parameter.name
            for parameter in inspect.signature(self.local_forward).parameters.values()
            if parameter.kind
            in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if list(self._inputs) != taken[: len(self._inputs)]:
            raise LayoutError(
                f"inputs declares {list(self._inputs)}, but local_forward of"
                f" {type(self).__name__} takes {taken}. Expected the names of its first"
                " arguments, in their order."
            )

    def _allocated(
        self, name: str, spec: ParameterSpec, device: Any, dtype: torch.dtype | None
    ) -> Tensor:
        self._specs[name] = spec
        ranges = self.ranges_of(name)
        if ranges is not None and isinstance(spec.layout, Shard):
            dim, num_dims = spec.layout.dim, len(spec.shape)
            if not -num_dims <= dim < num_dims or ranges.size != spec.shape[dim]:
                raise LayoutError(
                    f"{name} is declared with shape {spec.shape}, but the segments of its"
                    f" dim {dim} add up to {ranges.size}."
                )
        return torch.empty(self.own_shape(name), device=device, dtype=dtype)

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of the named parameter or buffer."""
        spec, ranges = self._specs[name], self.ranges_of(name)
        shape = list(spec.shape)
        if ranges is not None and isinstance(spec.layout, Shard):
            shape[spec.layout.dim] = ranges.length(self.group.rank)
        return tuple(shape)

    def _register(self, name: str, tensor: Tensor | None, is_buffer: bool) -> None:
        *path, leaf = name.split(".")
        module: nn.Module = self
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        if is_buffer:
            module.register_buffer(leaf, tensor)
        else:
            module.register_parameter(
                leaf, None if tensor is None else nn.Parameter(tensor)
            )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Take a parameter, also one that is assigned in the place of a declared one."""
        super().register_parameter(name, param)
        if param is not None and name in self._specs:
            owners.remember(param, self, name)

    def _remember_tensors(self) -> None:
        optimizer_checks.watch_steps(self.group)
        for name in self._specs:
            owners.remember(self.tensor_of(name), self, name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer; torch may make new parameters for it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._remember_tensors()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of a copied or unpickled layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._remember_tensors()

    @classmethod
    def dense_arguments(cls, dense: nn.Module) -> dict[str, Any]:
        """Return the constructor's arguments with which this class equals `dense`.

        Those are the attributes of `dense` that bear the arguments' names; of a parameter,
        a bias, whether there is one. A class whose dense twin keeps them under other names
        extends this.
        """
        names = inspect.signature(cls).parameters.keys() - {"device", "dtype"}
        given = {name: getattr(dense, name) for name in names if name in dir(dense)}
        if "bias" in given:
            given["bias"] = given["bias"] is not None
        return given

    @property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """The declared parameters and buffers, by dotted name."""
        return self._specs

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The declared axes; empty if nothing is sharded."""
        return self._axes

    def tensor_of(self, name: str) -> Tensor:
        """Return the local tensor of the parameter or buffer of that dotted name."""
        path, _, leaf = name.rpartition(".")
        return cast(Tensor, getattr(self.get_submodule(path), leaf))

    def set_tensor(self, name: str, tensor: Tensor) -> None:
        """Put `tensor`, of the local shape, in the place of the named parameter or buffer."""
        path, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(path), leaf, tensor)
        owners.remember(tensor, self, name)

    def ranges_of(self, name: str) -> Ranges | None:
        """Return who holds what of the named parameter's sharded dim; None if it is whole."""
        layout = self._specs[name].layout
        return self._ranges(layout) if isinstance(layout, Shard) else None

    def _ranges(self, layout: Shard) -> Ranges:
        return ranges_of(layout.segments, self._axes, self.group.size)

    def expect_unit_per_rank(self, name: str, num_units: int) -> None:
        """Check that every rank gets a unit, for layers whose compute needs one.

        Args:
            name: The constructor's argument that gives the number, for the error.
            num_units: How many units are to be divided.

        Raises:
            LayoutError: If there are fewer units than ranks.
        """
        size = self.group.size
        if num_units < size:
            raise LayoutError(
                f"{name}={num_units} is fewer than the {size} ranks of the group; each rank"
                f" needs at least one. Use a group of at most {num_units} ranks, or a layer"
                f" with at least {size}."
            )

    def own(self, axis: str) -> tuple[int, int]:
        """Return this rank's half-open range of units of the named axis."""
        return self._axes[axis].range(self.group.size, self.group.rank)

    def num_own(self, axis: str) -> int:
        """Return how many units of the named axis this rank holds."""
        start, stop = self.own(axis)
        return stop - start

    def shared(self, name: str) -> Tensor:
        """Return a parameter that several ranks hold, as sharded compute must read it.

        Its gradient is summed over the ranks that hold it. Whole parameters used inside
        `local_forward`, and shards of overlapping axes, are read through this; shards that
        one rank holds are read as attributes.
        """
        tensor, layout = self.tensor_of(name), self._specs[name].layout
        if isinstance(layout, Whole):
            return ops.copy(tensor, self.group)
        ranges = self._ranges(layout)
        return ops.sum_over_holders(tensor, layout.dim, ranges, self.group)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its first values, as the torch.nn layer would.

        Whole parameters are rank 0's on every rank, whatever the ranks' seeds.
        """
        for name, spec in self._specs.items():
            tensor = self.tensor_of(name)
            if tensor.is_meta:
                continue
            # A number is filled as a tensor of one element.
            spec.init.fill(tensor if spec.shape else tensor.view(1), self._part(name))
            if isinstance(spec.layout, Whole) and spec.init.is_random:
                tensor.copy_(collectives.broadcast(tensor.detach(), self.group))

    def _part(self, name: str) -> Part:
        spec, ranges = self._specs[name], self.ranges_of(name)
        if ranges is None or not isinstance(spec.layout, Shard):
            shape = spec.shape or (1,)
            return Part(shape, 0, ((0, shape[0]),))
        dim = spec.layout.dim % len(spec.shape)
        return Part(spec.shape, dim, ranges.per_rank[self.group.rank])

    @abstractmethod
    def local_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's output from inputs in the declared layouts."""

    def finish(self, output: Any) -> Any:
        """Return the layer's output from what the reduce gave: add a bias, divide a mean."""
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Move the inputs into their layouts, compute locally, and move the output out."""
        names = list(self._inputs)
        given = dict(zip(names, args, strict=False))
        given |= {name: kwargs[name] for name in names[len(args) :] if name in kwargs}
        self._expect_group()
        self._expect_plain_shards()
        if self.gather_batch and not names:
            raise LayoutError(
                f"{type(self).__name__} has gather_batch=True, but declares no inputs that"
                " could be pooled. Pool them before the layer with"
                " torchshard.distributed.enter_model_parallel."
            )
        data_parallel.expect_ignored_shards(self)
        # All are checked before the first is moved, which may take a collective.
        for name, x in given.items():
            if isinstance(x, Tensor):
                self._expect_fit(name, x, self._inputs[name])
        moved = self._entered(given)
        args = (*(moved.pop(name) for name in names[: len(args)]), *args[len(names) :])
        output = self.local_forward(*args, **{**kwargs, **moved})
        if isinstance(self._output, tuple):
            pairs = zip(output, self._output, strict=True)
            return self.finish(tuple(self._leave(y, layout) for y, layout in pairs))
        return self.finish(self._leave(output, self._output))

    def _expect_group(self) -> None:
        """Check that the model group is still the one that the layer was built for."""
        if torch.compiler.is_compiling():
            return
        now = resolve_group(None)
        is_spread = max(self.group.size, now.size) > 1
        if self._takes_model_group and is_spread and self.group != now:
            raise GroupError(
                f"{type(self).__name__} was built for the model group of its time, of"
                f" {self.group.size}, and the model group now has {now.size} ranks. Call"
                " torchshard.init_process_group() before building the model."
            )

    def _expect_plain_shards(self) -> None:
        """Check that no shard is worked out from others by torch's parametrizations."""
        parametrized = self._modules.get("parametrizations")
        if parametrized is None or self.group.size == 1:
            return
        for name, _ in parametrized.named_children():
            if self.ranges_of(name) is not None:
                raise LayoutError(
                    f"{type(self).__name__}.{name} is parametrized, and the"
                    " parametrization sees this rank's shard alone: norms and singular"
                    " values would be those of the shard. Remove it with"
                    " torch.nn.utils.parametrize.remove_parametrizations."
                )

    def _entered(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs in their declared layouts; a tensor given twice is moved once."""
        moved: dict[str, Any] = {}
        for name, x in given.items():
            layout = self._inputs[name]
            for earlier in moved:
                if given[earlier] is x and self._inputs[earlier] == layout:
                    moved[name] = moved[earlier]
                    break
            else:
                moved[name] = self._enter(x, layout)
        return moved

    def _enter(self, x: Any, layout: Layout) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self.gather_batch and not isinstance(x, ShardedTensor):
            is_summed = isinstance(layout, Whole) and bool(self._axes)
            x = ops.enter_model_parallel(
                x, grad="shards" if is_summed else "whole", group=self.group
            )
            if is_summed:  # the reduce-scatter has summed what `copy` would sum
                return x
        if isinstance(layout, Shard):
            if isinstance(x, ShardedTensor):
                return x.to_local()
            dim, ranges = layout.dim % x.dim(), self._ranges(layout)
            return ops.scatter(x, dim, ranges=ranges, group=self.group)
        # Where all ranks compute the same, the gradient is whole and must not be summed.
        is_spread = bool(self._axes) and self.group.size > 1
        if isinstance(x, ShardedTensor):
            return whole(x, "shards" if is_spread else "whole")
        return ops.copy(x, self.group) if is_spread and x.requires_grad else x

    def _expect_fit(self, name: str, x: Tensor, layout: Layout) -> None:
        self._expect_size(name, x, layout)
        if not isinstance(x, ShardedTensor):
            return
        held, kind = x.sharding, type(self).__name__
        if isinstance(layout, Shard):
            dim, ranges = layout.dim % x.dim(), self._ranges(layout)
            if (held.dim, held.ranges) != (dim, ranges):
                raise ShapeError(
                    f"{name} is sharded on dim {held.dim} as {held.ranges.lengths};"
                    f" {kind} takes it sharded on dim {dim} as {ranges.lengths}. Pass"
                    f" torchshard.distributed.gather({name}), the whole tensor, and the"
                    " layer will take its part."
                )
        elif not self._axes or self.group.size == 1:
            return
        if held.group != self.group:
            raise ShapeError(
                f"{name} is sharded over another group than that of {kind}. Pass"
                f" torchshard.distributed.gather({name}), the whole tensor."
            )

    def _expect_size(self, name: str, x: Tensor, layout: Layout) -> None:
        if isinstance(layout, Shard):
            dim, size = layout.dim, self._ranges(layout).size
        elif (
            isinstance(layout, Whole)
            and layout.dim is not None
            and layout.size is not None
        ):
            dim, size = layout.dim, layout.size
        else:
            return
        shape = whole_shape(x)
        fits = -len(shape) <= dim < len(shape)
        if not fits or shape[dim] != size:
            raise ShapeError(
                f"{name} has shape {tuple(shape)}; {type(self).__name__} expects size"
                f" {size} in dim {dim}." + self._lost_mark(name, shape, dim, layout)
            )

    def _lost_mark(
        self, name: str, shape: Sequence[int], dim: int, layout: Layout
    ) -> str:
        """Return the advice for a plain tensor that has the size of this rank's shard."""
        if not isinstance(layout, Shard) or not -len(shape) <= dim < len(shape):
            return ""
        if shape[dim] != self._ranges(layout).length(self.group.rank):
            return ""
        return (
            f" Size {shape[dim]} is this rank's share: if {name} is a shard, mark it with"
            f" ShardedTensor.from_local({name}, dim={dim})."
        )

    def _leave(self, output: Any, layout: Layout) -> Any:
        if output is None or isinstance(layout, Whole):
            return output
        if isinstance(layout, Partial):
            return ops.reduce(output, self.group)
        sharding = Sharding(layout.dim % output.dim(), self._ranges(layout), self.group)
        if output.shape[sharding.dim] != sharding.length:
            raise ShapeError(
                f"local_forward of {type(self).__name__} returned shape"
                f" {tuple(output.shape)}; its output is declared as a shard, of which rank"
                f" {self.group.rank} of {self.group.size} holds {sharding.length} in dim"
                f" {sharding.dim}."
            )
        marked = mark(output, sharding)
        return whole(marked) if self._gather_output else marked

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Take whole or local tensors, or DTensors: the shape says which."""
        assigns = local_metadata.get("assign_to_params_buffers", False)
        for name in self._specs:
            key = prefix + name
            if key in state_dict:
                own = self.own_state(key, name, state_dict[key])
                state_dict[key] = self._assignable(name, own) if assigns else own
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, *args, **kwargs
        )

    def _assignable(self, name: str, own: Tensor) -> Tensor:
        """Return `own` as the object that torch will put in the named tensor's place."""
        old = self.tensor_of(name)
        if isinstance(old, nn.Parameter) and not isinstance(own, nn.Parameter):
            own = nn.Parameter(own, requires_grad=old.requires_grad)
        owners.remember(own, self, name)
        return own

    def own_state(self, key: str, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of `value`, whole or already local, for parameter `name`.

        Args:
            key: The tensor's key in its state dict, for the error.
            name: The parameter's or buffer's dotted name in this layer.
            value: A tensor of the whole shape or the local one, or a whole-shaped DTensor,
                `torchshard.checkpoint.sharded_state_dict`'s included.

        Raises:
            StateError: If `value` has neither shape.
        """
        own_shape, spec = self.own_shape(name), self._specs[name]
        ranges = self.ranges_of(name)
        value = _without_dtensor(value, spec.layout, own_shape)
        if value.shape == own_shape:
            return value
        if ranges is None or value.shape != spec.shape:
            raise StateError(
                f"{key} has shape {tuple(value.shape)} in the state dict. Expected the"
                f" whole {spec.shape} or rank {self.group.rank}'s shard {own_shape}."
            )
        layout = cast(Shard, spec.layout)
        own = collectives.own_shard(value, layout.dim, ranges, self.group)
        # A view would keep the whole tensor alive, and torch.save would write all of it.
        return own.clone(memory_format=torch.contiguous_format)

    def extra_repr(self) -> str:
        """Return the sharding of each parameter, for `print(model)`."""
        parts = [f"rank={self.group.rank}/{self.group.size}"]
        for name, spec in self._specs.items():
            own = tuple(self.tensor_of(name).shape)
            parts.append(f"{name}={own} of {spec.shape}")
        return ", ".join(parts)


def _without_dtensor(
    value: Tensor, layout: Whole | Shard, own_shape: tuple[int, ...]
) -> Tensor:
    """Return a DTensor as a plain tensor: whole, or the shard if it is a list of chunks."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        local = value.to_local()
    if isinstance(local, LocalShardsWrapper) and isinstance(layout, Shard):
        chunks = local.local_shards()
        if not chunks:
            return torch.empty(own_shape, dtype=value.dtype, device=value.device)
        return torch.cat(chunks, layout.dim)
    return value.full_tensor()
