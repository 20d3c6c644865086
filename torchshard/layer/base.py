"""ParallelLayer: a layer that declares how it is sharded and computes on its own shard.

A layer declares its axes, its parameters, and the layouts of its inputs and output. From
that the base class cuts the parameters, initialises them as torch.nn does, moves activations
in and out (`passage`), and loads whole or local state (`local_state`). What the layer writes
itself is `local_forward`, in plain torch, and `finish`, for what comes after the reduce.

The declarations live on the module, keyed by parameter name; the parameters are plain local
`nn.Parameter`s.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torchshard import data_parallel
from torchshard.distributed import ops
from torchshard.distributed.groups import GroupLike, resolve_group
from torchshard.distributed.transforms import expect_no_transform
from torchshard.errors import GroupError, LayoutError
from torchshard.layer.declaration import ParameterSpec
from torchshard.layer.local_state import LocalState
from torchshard.layer.passage import Outputs, Passage
from torchshard.layer.sameness import expect_same_forward
from torchshard.layout import Axis, Layout, Shard, ranges_of
from torchshard.splits import Dim, Splits, code_of, split_named
from torchshard.tensor.asker import inside

if TYPE_CHECKING:
    from typing_extensions import Self


class ParallelLayer(LocalState, ABC):
    """Base of every sharded layer.

    A subclass calls `super().__init__(group, dim)`, sets its fields, and ends its constructor
    with `self.declare(...)`. It implements `local_forward` and, if something follows the reduce,
    `finish`.

    Args:
        group: The ranks that share the layer; None is the model group of
            `torchshard.distributed.init_process_group`, a group of one before that.
        dim: Which of the class' `splits`: a code or a name; None for no split, or for the
            only one of a class whose split has no code.

    Attributes:
        group: The `ShardGroup`, with `size` and `rank`.
        split: Name of the split, `"whole"` if the layer is not divided.
        dim: TorchShard's code for it: as it was given, or the split's first; None if it has
            none.
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

    splits: ClassVar[Splits] = {}
    """How the class can be divided, by name. A class that names none divides its axes."""

    def __init__(self, group: GroupLike = None, dim: Dim = None) -> None:
        super().__init__(group)
        self._takes_model_group = group is None
        self.split = split_named(self.splits, dim)
        self.dim = dim if isinstance(dim, int) else code_of(self.splits, self.split)
        self.gather_batch = False
        self._axes: dict[str, Axis] = {}
        self._passage: Passage | None = None

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
            LayoutError: If a parameter's segments do not add up to its shape, `inputs` does
                not name the first arguments of `local_forward`, the layer has declared
                before, or it has made a parameter itself.
        """
        buffers = buffers or {}
        self._expect_first_declaration({*parameters, *buffers})
        self._axes = dict(axes)
        if not self.splits:
            self.split = next(iter(self._axes), "whole")
        passage = Passage(
            type(self).__name__, self.group, axes, inputs, output, gather_output
        )
        passage.expect_arguments_of(self.local_forward)
        specs = {
            name: None if spec is None else self._placed(name, spec)
            for name, spec in [*parameters.items(), *buffers.items()]
        }
        for name, spec in specs.items():
            shape = None if spec is None else spec.own_shape(self.group.rank)
            tensor = (
                None
                if shape is None
                else torch.empty(shape, device=device, dtype=dtype)
            )
            self._register(name, tensor, is_buffer=name in buffers)
        self._specs |= {name: spec for name, spec in specs.items() if spec is not None}
        self._passage = passage
        self._remember_tensors()
        self.reset_parameters()
        self._specs = {
            name: replace(spec, init=spec.init.later)
            for name, spec in self._specs.items()
        }

    def _expect_first_declaration(self, names: set[str]) -> None:
        kind = type(self).__name__
        if self._passage is not None:
            raise LayoutError(
                f"{kind} has declared already. Call self.declare(...) once, at the end of the"
                " constructor, with all of its parameters."
            )
        for name, parameter in self._parameters.items():
            if parameter is not None and name not in self._specs:
                raise _undeclared(kind, name)
        if names & {"group", "split", "dim", "gather_batch"}:
            taken = sorted(names & {"group", "split", "dim", "gather_batch"})
            raise LayoutError(
                f"{kind} declares {taken}, which are attributes of every layer. Expected"
                " other names."
            )

    def _placed(self, name: str, spec: ParameterSpec) -> ParameterSpec:
        layout, axes = spec.layout, self._axes
        if not isinstance(layout, Shard):
            return spec.placed(name, None)
        return spec.placed(name, ranges_of(layout.segments, axes, self.group.size))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Take a parameter, in the place of a declared one, or None, which takes it away.

        Raises:
            LayoutError: If a layer on several ranks is given one that it has not declared.
            ShapeError: If it is not of this rank's shape.
        """
        is_new = param is not None and name not in self._parameters.keys() | self._specs
        if self.group.size > 1 and self._passage is not None and is_new:
            raise _undeclared(type(self).__name__, name)
        if param is not None and name in self._specs:
            self._expect_own_size(name, param)
        super().register_parameter(name, param)
        if param is None:
            self._specs.pop(name, None)  # `layer.bias = None`
        elif name in self._specs:
            self._remember(name, param)

    @classmethod
    def dense_arguments(cls, dense: nn.Module) -> dict[str, Any]:
        """Return the constructor's arguments with which this class equals `dense`.

        Those are the attributes of `dense` that bear the arguments' names; of a parameter,
        a bias, whether there is one. A class whose dense twin keeps them under other names
        extends this.
        """
        ours = {"device", "dtype", "dim", "group"}
        names = inspect.signature(cls).parameters.keys() - ours
        given = {name: getattr(dense, name) for name in names if name in dir(dense)}
        if "bias" in given:
            given["bias"] = given["bias"] is not None
        return given

    @property
    def axes(self) -> Mapping[str, Axis]:
        """The declared axes; empty if nothing is sharded."""
        return self._axes

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
        spec = self._spec_of(name)
        tensor = self.tensor_of(name)
        if spec.ranges is None:
            return ops.copy(tensor, self.group)
        return ops.sum_over_holders(tensor, spec.sharded_dim, spec.ranges, self.group)

    def takes_own_samples(self, name: str) -> bool:
        """Return whether the argument `name` holds each rank's own samples, along dim 0.

        TORCHSHARD_DEBUG=1 then lets the ranks differ in it. A layer that pools or exchanges an
        argument itself extends this.
        """
        return self.gather_batch

    @abstractmethod
    def local_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's output from inputs in the declared layouts."""

    def finish(self, output: Any) -> Any:
        """Return the layer's output from what the reduce gave: add a bias, divide a mean."""
        return output

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` on the layer's parts and on the layer, which then passes for a dense one.

        `model.apply(init)` takes functions that ask `isinstance(module, nn.Linear)`. What they
        do to a divided parameter is done to the whole.
        """
        for child in self.children():
            child.apply(fn)
        own_class = passing = type(self)
        if self.dense_class is not None and not issubclass(own_class, self.dense_class):
            passing = type(own_class.__name__, (own_class, self.dense_class), {})
            self.__class__ = passing
        inside.applied += 1  # sizes of parameters read there are the whole's
        try:
            fn(self)
        finally:
            inside.applied -= 1
            if type(self) is passing:
                self.__class__ = own_class
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Move the inputs into their layouts, compute locally, and move the output out."""
        passage = self._passage
        if passage is None:
            raise LayoutError(
                f"{type(self).__name__} has declared nothing. End its constructor with"
                " self.declare(...): axes, parameters, inputs and output."
            )
        self._expect_group()
        self._expect_plain_shards()
        if not torch.compiler.is_compiling():
            self.expect_held()
            if self.group.size > 1:
                expect_no_transform(type(self).__name__)
        data_parallel.expect_ignored_shards(self)
        inside.depth += 1  # what is read of the parameters here are shards
        try:
            expect_same_forward(self, args, kwargs)
            args, kwargs = passage.enter(args, kwargs, self.gather_batch)
            return self.finish(passage.leave(self._computed(*args, **kwargs)))
        finally:
            inside.depth -= 1

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `local_forward` gives; a base class may stand between."""
        return self.local_forward(*args, **kwargs)

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


def _undeclared(kind: str, name: str) -> LayoutError:
    return LayoutError(
        f"{kind}.{name} is a parameter that the layer has not declared, so that ranks would"
        " not agree on it. Name it in declare(parameters=...), with ts.Whole() if every rank"
        " holds all of it."
    )
