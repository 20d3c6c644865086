"""The tensors that a rank holds of a layer: allocated, initialised, loaded, found by name.

A layer's state is local. What is loaded into it may be local or whole, or a DTensor: the
shape says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torchshard import optimizer_checks, owners
from torchshard.distributed import collectives
from torchshard.distributed.groups import GroupLike, resolve_group
from torchshard.errors import LayoutError, ShapeError, StateError
from torchshard.initializer import Part
from torchshard.layer.declaration import ParameterSpec
from torchshard.layout import Ranges
from torchshard.shard_notes import expect_own_shards, note_shards
from torchshard.tensor import ShardedTensor, Sharding
from torchshard.tensor.dtensors import in_form, wanted_form, without_dtensor
from torchshard.tensor.parameter import ShardedParameter, known_as_shard
from torchshard.tensor.sharded import let_torch_take_marks

if TYPE_CHECKING:
    from typing_extensions import Self


class LocalState(nn.Module):
    """A module that holds this rank's part of declared parameters and buffers.

    Args:
        group: The ranks that share it; None is the model group.

    Attributes:
        group: The `ShardGroup`, with `size` and `rank`.
    """

    def __init__(self, group: GroupLike = None) -> None:
        super().__init__()
        self.group = resolve_group(group)
        self.dim: int | None = None
        self._specs: dict[str, ParameterSpec] = {}

    @property
    def specs(self) -> Mapping[str, ParameterSpec]:
        """The declared parameters and buffers, by dotted name."""
        return self._specs

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of the named parameter or buffer."""
        return self._spec_of(name).own_shape(self.group.rank)

    def ranges_of(self, name: str) -> Ranges | None:
        """Return who holds what of the named parameter's sharded dim; None if it is whole."""
        return self._spec_of(name).ranges

    def _spec_of(self, name: str) -> ParameterSpec:
        if name not in self._specs:
            raise LayoutError(
                f"{type(self).__name__} has no parameter or buffer {name!r}. It declared"
                f" {list(self._specs)}; what was set to None is taken away."
            )
        return self._specs[name]

    def sharding_of(self, name: str) -> Sharding | None:
        """Return how the named parameter or buffer is spread; None if it is whole."""
        spec = self._spec_of(name)
        if spec.ranges is None:
            return None
        return Sharding(spec.sharded_dim, spec.ranges, self.group)

    def tensor_of(self, name: str) -> Tensor:
        """Return the local tensor of the parameter or buffer of that dotted name.

        Raises:
            LayoutError: If it was deleted or renamed.
        """
        tensor = self._held(name)
        if tensor is None:
            own_shape = self.own_shape(name)
            raise LayoutError(
                f"{type(self).__name__} has no {name!r} any more, which it declared: it was"
                f" deleted, or renamed. Put it back, as layer.{name} = nn.Parameter(x) with x of"
                f" shape {own_shape}, this rank's part. An optional one is taken away with"
                f" layer.{name} = None."
            )
        return tensor

    def _held(self, name: str) -> Tensor | None:
        """Return the local tensor of that name, None if it is gone."""
        path, _, leaf = name.rpartition(".")
        try:
            return cast("Tensor | None", getattr(self.get_submodule(path), leaf))
        except AttributeError:
            return None

    def expect_held(self) -> None:
        """Check that what was declared is there, and forget what was set to None in a part.

        Raises:
            LayoutError: If a parameter or buffer was deleted or renamed.
            ShapeError: If one is not of this rank's shape.
        """
        for name, spec in list(self._specs.items()):
            if self._held(name) is None and self._is_none(name):
                del self._specs[name]  # `layer.out_proj.bias = None`
                continue
            tensor = self.tensor_of(name)
            if spec.ranges is not None:
                self._expect_own_size(name, tensor)

    def _is_none(self, name: str) -> bool:
        path, _, leaf = name.rpartition(".")
        try:
            part = self.get_submodule(path)
        except AttributeError:
            return False
        return leaf in part._parameters or leaf in part._buffers

    def _expect_own_size(self, name: str, tensor: Tensor) -> None:
        spec, rank = self._specs[name], self.group.rank
        own_shape = spec.own_shape(rank)
        with (
            torch._C.DisableTorchFunction()
        ):  # modes, too: nobody reads the parameter here
            shape = tuple(tensor.shape)
        if self.group.size > 1 and shape != own_shape:
            dim = spec.sharded_dim
            raise ShapeError(
                f"{type(self).__name__}.{name} was given a tensor of shape {shape}. Expected"
                f" rank {rank}'s shard {own_shape} of the whole {spec.shape}. Load whole values"
                " with layer.load_state_dict, or cut them with"
                f" torchshard.distributed.scatter(whole, {dim}, grad='whole')."
            )

    def set_tensor(self, name: str, tensor: Tensor) -> None:
        """Put `tensor`, of the local shape, in the place of the named parameter or buffer."""
        path, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(path), leaf, tensor)
        self._remember(name, tensor)

    def _remember(self, name: str, tensor: Tensor) -> None:
        """Enter `tensor` as the named one, and have a parameter know what it is a shard of."""
        owners.remember(tensor, self, name)
        sharding = self.sharding_of(name)
        if sharding is not None and self.group.size > 1:
            # `layer.weight = nn.Parameter(torch.randn_like(layer.weight))` is marked already.
            is_kin = isinstance(tensor, ShardedTensor) and tensor.sharding == sharding
            is_kin &= isinstance(tensor, nn.Parameter)
            if type(tensor) in (nn.Parameter, ShardedParameter) or is_kin:
                known_as_shard(cast(nn.Parameter, tensor), sharding)
        elif type(tensor) is nn.Parameter:
            tensor.parallel_dim = owners.split_code(self, name)  # type: ignore[attr-defined] # TorchShard 0.1.0's

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

    def _remember_tensors(self) -> None:
        optimizer_checks.watch_steps(self.group)
        if self.group.size > 1:
            let_torch_take_marks()
        for name in list(self._specs):
            tensor = self._held(name)
            if tensor is not None:
                self._remember(name, tensor)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the layer; torch may make new parameters for it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._remember_tensors()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the state of a copied or unpickled layer."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._remember_tensors()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set every parameter and buffer to its first values, as the torch.nn layer would.

        Whole parameters are rank 0's on every rank, whatever the ranks' seeds.
        """
        for name, spec in self._specs.items():
            tensor = self.tensor_of(name).detach()
            if tensor.is_meta:
                continue
            # A number is filled as a tensor of one element.
            spec.init.fill(tensor if spec.shape else tensor.view(1), self._part(spec))
            if spec.ranges is None and spec.init.is_random:
                tensor.copy_(collectives.broadcast(tensor, self.group))

    def _part(self, spec: ParameterSpec) -> Part:
        if spec.ranges is None:
            shape = spec.shape or (1,)
            return Part(shape, 0, ((0, shape[0]),))
        return Part(spec.shape, spec.sharded_dim, spec.ranges.per_rank[self.group.rank])

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Save the local tensors, and whose they are in the state's metadata.

        For `torch.distributed.checkpoint` they are DTensors, which say so themselves: those
        that are parameters become it where torch detaches them.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.group.size == 1:
            return
        form = wanted_form()
        if form == "local" or keep_vars:
            note_shards(self, destination, prefix)
            return
        for name in self._specs:
            sharding, key = self.sharding_of(name), prefix + name
            is_known = isinstance(self.tensor_of(name), ShardedParameter)
            if sharding is not None and key in destination and not is_known:
                destination[key] = in_form(destination[key], sharding, form)

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
        if self.group.size > 1:
            expect_own_shards(self, state_dict, prefix, local_metadata)
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
        self._remember(name, own)
        return own

    def own_state(self, key: str, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of `value`, whole or already local, for parameter `name`.

        Args:
            key: The tensor's key in its state dict, for the error.
            name: The parameter's or buffer's dotted name in this layer.
            value: A tensor of the whole shape or the local one, or a whole-shaped DTensor,
                `torchshard.sharded_state_dict`'s included.

        Raises:
            StateError: If `value` has neither shape.
        """
        own_shape, spec = self.own_shape(name), self._specs[name]
        value = without_dtensor(value, spec.sharded_dim, own_shape)
        if value.shape == own_shape:
            return value
        if spec.ranges is None or value.shape != spec.shape:
            raise StateError(
                f"{key} has shape {tuple(value.shape)} in the state dict. Expected the"
                f" whole {spec.shape} or rank {self.group.rank}'s shard {own_shape}."
            )
        own = collectives.own_shard(value, spec.sharded_dim, spec.ranges, self.group)
        # A view would keep the whole tensor alive, and torch.save would write all of it.
        return own.clone(memory_format=torch.contiguous_format)

    def extra_repr(self) -> str:
        """Return the sharding of each parameter, for `print(model)`."""
        parts = [f"rank={self.group.rank}/{self.group.size}"]
        for name, spec in self._specs.items():
            tensor = self._held(name)
            own = "none" if tensor is None else tuple(tensor.shape)
            parts.append(f"{name}={own} of {spec.shape}")
        return ", ".join(parts)
