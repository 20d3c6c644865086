"""MarkedLayer: a layer whose forward was written for one device, run on divided parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchshard.distributed import collectives
from torchshard.distributed.groups import GroupLike
from torchshard.initializer import Kept
from torchshard.layer.base import ParallelLayer
from torchshard.layer.declaration import ParameterSpec
from torchshard.layout import Axis, Shard, Whole
from torchshard.splits import Dim
from torchshard.tensor import mark
from torchshard.tensor.sharded import is_in_backward


class MarkedLayer(ParallelLayer):
    """Base of a layer that computes with its parameters as if they were whole.

    Inside `dense_forward` a divided parameter reads as a `ShardedTensor`, so that the rules of
    torch's operations (`torchshard.tensor`) move and sum where that is due: the forward of the
    dense layer runs as it stands. It costs the rules' time, some microseconds an operation;
    a `ParallelLayer` with a local forward does without.

    Such a layer declares no inputs and `ts.Whole()` as its output: the forward gets what the
    caller gives, and the caller what it returns, marked where it is a shard. One that has a
    dense module at hand takes that over, in place of a declaration.

    Example:
        >>> import torch, torchshard as ts
        >>> class ParallelProjection(ts.MarkedLayer):
        ...     def __init__(self, size, *, group=None):
        ...         super().__init__(group)
        ...         self.declare(
        ...             axes={"size": ts.Axis(size)},
        ...             parameters={
        ...                 "weight": ts.ParameterSpec(
        ...                     (size, 4), ts.Shard(0, "size"), ts.Constant(1.0)
        ...                 )
        ...             },
        ...             inputs={},
        ...             output=ts.Whole(),
        ...         )
        ...
        ...     def dense_forward(self, x):
        ...         return torch.nn.functional.linear(x, self.weight)
        >>> ParallelProjection(6)(torch.ones(2, 4)).shape
        torch.Size([2, 6])
    """

    def __init__(self, group: GroupLike = None, dim: Dim = None) -> None:
        super().__init__(group, dim)
        self._marks = False

    def __getattr__(self, name: str) -> Any:
        value: Any = super().__getattr__(name)
        # In backward, it is a checkpoint that runs the forward's code again.
        if not (self.__dict__.get("_marks") or is_in_backward()):
            return value
        spec = self.__dict__["_specs"].get(name)
        sharding = None if spec is None else self.sharding_of(name)
        if sharding is None or value is None:
            return value
        shared = self.shared(name) if spec.grad == "overlapping" else value
        return mark(shared.view_as(shared), sharding)

    def _held(self, name: str) -> Tensor | None:
        """Return the local tensor itself, unmarked, inside the forward too."""
        path, _, leaf = name.rpartition(".")
        part = self.get_submodule(path)
        return (part._parameters | part._buffers).get(leaf)

    def take_over(self, dense: nn.Module, divided: Mapping[str, int]) -> None:
        """Hold what `dense` holds, in its order, and declare that. Called once, as `declare`.

        Its values become rank 0's on every rank. Modules, buffers and whole parameters are
        the same objects, which others may share; of divided parameters each rank keeps its
        part. Other attributes are taken over where the layer has none of the name.

        Args:
            dense: A module, built whole.
            divided: Its own parameters that are divided, each with the dim. One that `dense`
                does not have, an optional bias, is left out.
        """
        with torch.no_grad():
            for tensor in [*dense.parameters(), *dense.buffers()]:
                if not tensor.is_meta:
                    tensor.copy_(collectives.broadcast(tensor, self.group))
        for name, module in dense._modules.items():
            self.add_module(name, module)
        for name, buffer in dense._buffers.items():
            is_kept = name not in dense._non_persistent_buffers_set
            self.register_buffer(name, buffer, persistent=is_kept)
        for name, value in vars(dense).items():
            if not hasattr(self, name):
                setattr(self, name, value)
        cut = {
            name: parameter
            for name, parameter in dense._parameters.items()
            if parameter is not None and name in divided
        }
        for name, parameter in dense._parameters.items():
            if name not in cut:
                self._hold_whole(name, parameter)
        self._declare_cut(cut, divided)
        held = dict(self._parameters)
        self._parameters.clear()
        self._parameters.update({name: held[name] for name in dense._parameters})

    def _hold_whole(self, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            spec = ParameterSpec(tuple(parameter.shape), Whole(), Kept())
            self._specs[name] = spec.placed(name, None)
        self.register_parameter(name, parameter)

    def _declare_cut(
        self, cut: Mapping[str, nn.Parameter], divided: Mapping[str, int]
    ) -> None:
        specs = {
            name: ParameterSpec(tuple(whole.shape), Shard(divided[name], name), Kept())
            for name, whole in cut.items()
        }
        self.declare(
            axes={
                name: Axis(whole.shape[divided[name]]) for name, whole in cut.items()
            },
            parameters=specs,
            inputs={},
            output=Whole(),
            device="meta",  # what is held comes next
        )
        for name, whole in cut.items():
            own = self.own_state(name, name, whole.detach())
            self.set_tensor(name, nn.Parameter(own, whole.requires_grad))

    def local_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the dense forward, with divided parameters marked."""
        self._marks = True
        try:
            return self.dense_forward(*args, **kwargs)
        finally:
            self._marks = False

    @abstractmethod
    def dense_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output as the dense layer does."""
