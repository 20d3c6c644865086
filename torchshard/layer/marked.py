"""MarkedLayer: a layer whose forward was written for one device, run on divided parameters."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torchshard.distributed.groups import GroupLike
from torchshard.layer.base import ParallelLayer
from torchshard.splits import Dim
from torchshard.tensor import Sharding, mark


class MarkedLayer(ParallelLayer):
    """Base of a layer that computes with its parameters as if they were whole.

    Inside `dense_forward` a divided parameter reads as a `ShardedTensor`, so that the rules of
    torch's operations (`torchshard.tensor`) move and sum where that is due: the forward of the
    dense layer runs as it stands. It costs the rules' time, some microseconds an operation;
    a `ParallelLayer` with a local forward does without.

    Such a layer declares no inputs and `ts.Whole()` as its output: the forward gets what the
    caller gives, and the caller what it returns, marked where it is a shard.

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
        if not self.__dict__.get("_marks"):
            return value
        spec = self.__dict__["_specs"].get(name)
        if spec is None or spec.ranges is None or value is None:
            return value
        sharding = Sharding(spec.sharded_dim, spec.ranges, self.group)
        shared = self.shared(name) if spec.grad == "overlapping" else value
        return mark(shared.view_as(shared), sharding)

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
