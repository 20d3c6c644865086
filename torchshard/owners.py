"""Which layer a parameter belongs to: a weak index, for functions that get a bare tensor.

Layouts live on the layer, keyed by parameter name. Functions of torch's own form, such as
`shard_init_helper_(init, tensor)`, are given the parameter alone and look its layer up here.
Layers enter themselves when they are built, copied, unpickled or moved.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torchshard.distributed.groups import ShardGroup
from torchshard.layout import Ranges, Shard

if TYPE_CHECKING:
    from torchshard.layer.declaration import ParameterSpec
    from torchshard.tensor import Sharding


class Owner(Protocol):
    """A layer, as functions that are given one of its parameters see it."""

    group: ShardGroup
    dim: int | None

    @property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """What the layer declared of each parameter and buffer."""

    def ranges_of(self, name: str) -> Ranges | None:
        """Return who holds what of the parameter's sharded dim."""

    def sharding_of(self, name: str) -> Sharding | None:
        """Return how the parameter is spread; None if it is whole."""

    def tensor_of(self, name: str) -> Tensor:
        """Return the local tensor."""

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the local tensor."""

    def own_state(self, key: str, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of `value`."""


_owners = WeakIdKeyDictionary()


def remember(tensor: Tensor, layer: Owner, name: str) -> None:
    """Enter `tensor` as the parameter or buffer `name` of `layer`."""
    _owners[tensor] = (weakref.ref(layer), name)


def owner_of(tensor: Tensor) -> tuple[Owner, str] | None:
    """Return the layer that `tensor` is a parameter of, and its name there, or None."""
    if tensor not in _owners:
        return None
    reference, name = _owners[tensor]
    layer = reference()
    return None if layer is None else (layer, name)


def owner_of_data(tensor: Tensor) -> tuple[Owner, str] | None:
    """Return the layer and the name of the parameter of which `tensor` is the `.data`, or None."""
    if tensor.is_meta or not tensor.numel():
        return None
    for known in list(_owners):
        place = (known.data_ptr(), known.shape, known.dtype)
        if place == (tensor.data_ptr(), tensor.shape, tensor.dtype):
            return owner_of(known)
    return None


def shard_owner_of(tensor: Tensor) -> tuple[Owner, str] | None:
    """Return what `owner_of` does for a shard on several ranks, None for any other tensor."""
    found = owner_of(tensor)
    if found is None:
        return None
    layer, name = found
    is_shard = layer.group.size > 1 and layer.ranges_of(name) is not None
    return found if is_shard else None


def is_sharded(tensor: Tensor) -> bool:
    """Return whether `tensor` is a shard of a layer's parameter on several ranks."""
    return shard_owner_of(tensor) is not None


def split_code(layer: Owner, name: str) -> int | None:
    """Return TorchShard 0.1.0's code for a layer's parameter: -1, 0, or None if it is whole.

    That of the layer's split; of a layer without codes -1 for a divided first dim, as weights
    are stored (out, in).
    """
    spec = layer.specs[name]
    if not isinstance(spec.layout, Shard):
        return None
    is_column = spec.sharded_dim == 0 if layer.dim is None else layer.dim in (1, -1)
    return -1 if is_column else 0
