"""TorchShard 0.1.0's names for marking tensors and cutting them, for scripts that use them.

Layers mark their outputs themselves, as `ShardedTensor`s, and parameters have their layouts
from their layers; new code needs none of this. TorchShard's codes: 1 or -1 is sharded on the
last dim (column parallel), 0 on the first (row parallel), None is whole. Scripts read and set
them as an attribute, too: `getattr(layer.weight, torchshard._PARALLEL_DIM)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from torchshard.distributed import ops
from torchshard.distributed.groups import model_group
from torchshard.errors import LayoutError
from torchshard.owners import owner_of, split_code
from torchshard.tensor import ShardedTensor, Sharding, recalled
from torchshard.tensor.parameter import ShardedParameter

_PARALLEL_DIM = "parallel_dim"
_ORDER_ATTR = "order_type"

_registered = WeakIdKeyDictionary()
"""The dim that was registered for a tensor, as it was given."""


def get_parallel_dim(tensor: Tensor) -> int | None:
    """Return the dim that `tensor` is sharded on: what was registered, or its layer's doing.

    -1 for the last dim, otherwise counted from the front; None for a whole tensor. For a
    layer's parameter it is TorchShard's code: -1 if the output features are divided, 0 if the
    input features or the rows of a table are, also in a group of one.

    Example:
        >>> x = torch.ones(2, 3)
        >>> register_parallel_dim(x, -1)
        >>> get_parallel_dim(x)
        -1
    """
    if tensor in _registered:
        registered: int | None = _registered[tensor]
        return registered
    tensor = recalled(tensor)
    if isinstance(tensor, ShardedTensor):
        dim = tensor.sharding.dim
        return -1 if dim == tensor.dim() - 1 else dim
    place = owner_of(tensor)
    if place is not None:
        return split_code(*place)
    if isinstance(tensor, ShardedParameter):  # layer.weight.data
        return -1 if tensor.sharding.dim == 0 else 0
    return None


def register_parallel_dim(tensor: Tensor, parallel_dim: int | None) -> None:
    """Mark `tensor`, in place, as this rank's shard along `parallel_dim`.

    Over several ranks it becomes a `ShardedTensor`, whose shape is that of the whole; the
    ranks exchange their sizes. `ShardedTensor.from_local(x, dim)` does the same and leaves
    its argument alone.

    Args:
        tensor: A tensor, on every rank.
        parallel_dim: The dim, or None to take the mark away.

    Raises:
        LayoutError: If the tensor has no such dim, or over several ranks is a parameter:
            what a parameter is a shard of is declared by its layer.
    """
    if parallel_dim is not None and not -tensor.dim() <= parallel_dim < tensor.dim():
        raise LayoutError(
            f"parallel_dim={parallel_dim} is no dim of a tensor with {tensor.dim()} dims."
            " Expected one of them, or None for a whole tensor."
        )
    if model_group().size > 1:
        if isinstance(tensor, nn.Parameter):
            _expect_declared(tensor, parallel_dim)
        else:
            _mark_in_place(tensor, parallel_dim)
    _registered[tensor] = parallel_dim


def _expect_declared(parameter: Tensor, parallel_dim: int | None) -> None:
    place = owner_of(parameter)
    declared = None if place is None else split_code(*place)
    code = -1 if parallel_dim == 1 else parallel_dim
    if place is None or declared != code:
        raise LayoutError(
            f"parallel_dim={parallel_dim} was registered for a parameter that"
            f" {'no layer declares' if place is None else f'its layer divides by {declared}'}."
            " Derive the layer from torchshard.ParallelLayer and declare the parameter's"
            " layout there: gathering, loading and DistributedDataParallel follow it."
        )


def _mark_in_place(tensor: Tensor, parallel_dim: int | None) -> None:
    if isinstance(tensor, ShardedTensor):
        if (
            parallel_dim is not None
            and parallel_dim % tensor.dim() == tensor.sharding.dim
        ):
            return
        tensor.__class__ = Tensor  # type: ignore[assignment] # to the plain shard that it is
    if parallel_dim is not None:
        group = model_group()
        ranges = ops.exchanged_ranges(tensor, parallel_dim, group)
        dim = parallel_dim % tensor.dim()
        tensor.__class__ = ShardedTensor
        tensor.sharding = Sharding(dim, ranges, group)  # type: ignore[attr-defined]


class _ParallelDim:
    """The attribute `parallel_dim` of what is, or may be, a shard."""

    def __get__(self, tensor: Tensor, kind: type) -> int | None:
        return get_parallel_dim(tensor)

    def __set__(self, tensor: Tensor, parallel_dim: int | None) -> None:
        register_parallel_dim(tensor, parallel_dim)


for _kind in (ShardedTensor, ShardedParameter):
    setattr(_kind, _PARALLEL_DIM, _ParallelDim())


def register_parallel_attribute(
    tensor: Tensor, parallel_dim: int | None, order_type: int = 0
) -> None:
    """Do what `register_parallel_dim` does.

    Args:
        tensor: As there.
        parallel_dim: As there.
        order_type: Whether a layer's weight is stored (out, in), 0, or (in, out), 1. Layers
            declare it; nothing reads it here.

    Raises:
        LayoutError: As there, or if `order_type` is another number.
    """
    if order_type not in (0, 1):
        raise LayoutError(
            f"order_type={order_type} is unknown. Expected 0 for weights stored (out, in),"
            " 1 for (in, out)."
        )
    register_parallel_dim(tensor, parallel_dim)


def set_attribute(
    tensor: Tensor, value: int | None = None, order_type: int = 0
) -> None:
    """Do what `register_parallel_attribute` does, under its older name."""
    register_parallel_attribute(tensor, value, order_type)


def slice(
    tensor: Tensor,
    num_partitions: int,
    dim: int | None = None,
    contiguous: bool = False,
) -> tuple[Tensor, ...]:
    """Cut `tensor` into parts as even as they can be: the first get one more.

    Args:
        tensor: Whole tensor.
        num_partitions: Number of parts.
        dim: The dim to cut; None is the last.
        contiguous: Whether the parts are contiguous rather than views.

    Raises:
        LayoutError: If `num_partitions` is less than 1.

    Example:
        >>> [part.shape for part in slice(torch.ones(3, 5), 2)]
        [torch.Size([3, 3]), torch.Size([3, 2])]
    """
    if num_partitions < 1:
        raise LayoutError(
            f"num_partitions={num_partitions} is less than 1. Expected a number of parts."
        )
    parts = torch.tensor_split(tensor, num_partitions, -1 if dim is None else dim)
    return tuple(part.contiguous() if contiguous else part for part in parts)


class RegisterParallelDim(nn.Module):
    """Mark the tensors that pass as this rank's shards along `dim`.

    For the place between layers where a script has computed on shards itself. The argument
    is left alone; what is returned carries the mark.

    Args:
        dim: The dim, or None to hand shards on as plain tensors.

    Raises:
        LayoutError: If a tensor has no such dim, or is marked as a shard of another one.
        TypeError: If it is given something else than tensors.

    Example:
        >>> get_parallel_dim(RegisterParallelDim(dim=0)(torch.ones(3)))
        0
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, input: Any) -> Any:
        """Return the tensor, or the list or tuple of tensors, marked."""
        if isinstance(input, list | tuple):
            return type(input)(self.forward(x) for x in input)
        if not isinstance(input, Tensor):
            raise TypeError(
                f"RegisterParallelDim was given a {type(input).__name__}. Expected a tensor,"
                " or a list or tuple of tensors."
            )
        if isinstance(input, ShardedTensor):
            return self._checked(input)
        marked = input.view_as(input)
        if torch.compiler.is_compiling():
            return (
                marked
                if self.dim is None
                else ShardedTensor.from_local(marked, self.dim)
            )
        register_parallel_dim(marked, self.dim)
        return marked

    def _checked(self, input: ShardedTensor) -> Tensor:
        if self.dim is None:
            return input.to_local()
        if input.sharding.dim != self.dim % input.dim():
            raise LayoutError(
                f"RegisterParallelDim(dim={self.dim}) was given a shard on dim"
                f" {input.sharding.dim}. Gather it first, or leave the module out."
            )
        return input

    def extra_repr(self) -> str:
        """Return the dim, for `print(model)`."""
        return f"dim={self.dim}"
