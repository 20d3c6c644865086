"""Mirror of torch.distributed.optim: optimizer state divided over replicas, shards left alone.

torch's ZeroRedundancyOptimizer sends every parameter from the rank that updates it to all
others of its group. That is right for parameters that are equal on those ranks, and would
overwrite shards, which are not. torchshard's keeps the two apart; torch's own is refused
before its first step where it was given shards (`torchshard/optimizer_checks.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torchshard.errors import StateError
from torchshard.layer import ParallelLayer
from torchshard.owners import Owner, is_sharded, remember, shard_owner_of
from torchshard.state import gathered

Parameters: TypeAlias = "nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]]"
Group: TypeAlias = dict[str, Any]


class ZeroRedundancyOptimizer(Optimizer):
    """An optimizer whose state for whole parameters is divided over the ranks.

    Shards are updated where they are, by a plain `optimizer_class`: their state is divided
    already. Every other parameter goes to torch's
    `torch.distributed.optim.ZeroRedundancyOptimizer`: one rank updates it, and sends it to
    the others. Training equals that with `optimizer_class` alone. Without torch.distributed
    it is `optimizer_class`.

    Schedulers, gradient scalers and hooks take it as any optimizer. Its state is read in two
    steps, as with torch's: `consolidate_state_dict` on all ranks, then `state_dict` on one.
    That state has whole tensors, and is the dense model's optimizer's.

    Args:
        model: The model; or its parameters, or groups of them as torch's optimizers take.
        optimizer_class: Class of the optimizer that does the work.
        process_group: The ranks that hold the whole parameters alike; None is the world.
        parameters_as_bucket_view: As for torch's, for the whole parameters.
        defaults: Arguments of `optimizer_class`.

    Raises:
        StateError: From `add_param_group`: give all groups at construction.

    Example:
        >>> layer = nn.Linear(3, 4)
        >>> optimizer = ZeroRedundancyOptimizer(layer, torch.optim.SGD, lr=0.1)
        >>> layer(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: Parameters,
        optimizer_class: type[Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        **defaults: Any,
    ) -> None:
        self._parts: list[Optimizer] = []
        self._consolidated: dict[int, Any] | None = None
        given = _entered(model) if isinstance(model, nn.Module) else model
        super().__init__(given, dict(defaults))
        is_divided = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(process_group) if is_divided else None
        local = [_without_whole(group, not is_divided) for group in self.param_groups]
        whole = [_whole_only(group, is_divided) for group in self.param_groups]
        self._local = self._zero = None
        if _has_parameters(local):
            self._local = optimizer_class(local, **defaults)
            self._parts.append(self._local)
        if _has_parameters(whole):
            self._zero = _torch_zero()(
                whole,
                optimizer_class,
                process_group=process_group,
                parameters_as_bucket_view=parameters_as_bucket_view,
                **defaults,
            )
            self._parts.append(self._zero)
        self._take_settings()

    def _take_settings(self) -> None:
        """Copy what the parts know of their groups, beside the parameters, to ours."""
        for part in self._parts:
            for own, group in zip(self.param_groups, part.param_groups, strict=True):
                own.update(_settings(group))

    def _give_settings(self) -> None:
        """Copy what a scheduler or the user may have set to the parts."""
        for part in self._parts:
            for own, group in zip(self.param_groups, part.param_groups, strict=True):
                group.update(_settings(own))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters.

        Args:
            closure: Recomputes the loss, on all ranks.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._give_settings()
        for part in self._parts:
            part.step()
        self._take_settings()
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, while the optimizer is built; refused afterwards."""
        if self._parts:
            raise StateError(
                "add_param_group after construction is not supported, since the state is"
                " divided over the ranks by then. Give all groups at construction, those to"
                " be trained later with requires_grad=False."
            )
        super().add_param_group(param_group)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Send the whole state to one rank, on the CPU. Every rank calls it.

        Args:
            to: Rank in `process_group`, which then may call `state_dict`.

        Raises:
            StateError: If the optimizer keeps for a shard what is no shard itself, such as
                row sums, which cannot be put together.
        """
        self._give_settings()
        is_destination = self._rank in (to, None)
        state: dict[int, Any] = {}
        if self._zero is not None:
            self._zero.consolidate_state_dict(to)
            if is_destination:
                indices = self._indices_of(self._zero)
                packed = self._zero.state_dict()["state"]
                state.update({indices[key]: entry for key, entry in packed.items()})
        if self._local is not None:
            for index in self._indices_of(self._local):
                parameter = self._flat()[index]
                if parameter in self._local.state:
                    entry = _gathered_state(parameter, self._local.state[parameter])
                    if is_destination:
                        state[index] = entry
        self._consolidated = dict(sorted(state.items())) if is_destination else None

    def _flat(self) -> list[Tensor]:
        """Return the parameters in the order in which the state dict counts them."""
        return [tensor for group in self.param_groups for tensor in group["params"]]

    def _indices_of(self, part: Optimizer) -> list[int]:
        """Return where the parameters of `part`, in its order, stand in `_flat`."""
        index_of = {id(tensor): index for index, tensor in enumerate(self._flat())}
        return [index_of[id(t)] for group in part.param_groups for t in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `consolidate_state_dict` left it, in the dense optimizer's form.

        Raises:
            StateError: If the state was not sent to this rank.
        """
        if self._consolidated is None:
            raise StateError(
                "The optimizer's state is divided over the ranks. Call"
                " consolidate_state_dict(to=...) on all ranks first, and state_dict() on"
                " that rank only."
            )
        groups, start = [], 0
        for group in self.param_groups:
            stop = start + len(group["params"])
            groups.append({**_settings(group), "params": list(range(start, stop))})
            start = stop
        return {"state": dict(self._consolidated), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state with whole tensors. Every rank calls it with the same state.

        Args:
            state_dict: What `state_dict` returned, at any number of ranks, or the state of
                the dense model's `optimizer_class`.

        Raises:
            StateError: If its groups are not those of this optimizer.
        """
        own_sizes = [len(group["params"]) for group in self.param_groups]
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != own_sizes:
            raise StateError(
                f"The state has parameter groups of {sizes} parameters; this optimizer has"
                f" {own_sizes}. Build it from the same model and groups."
            )
        for part in self._parts:
            part.load_state_dict(self._state_of(part, state_dict))
        self._take_settings()
        self._consolidated = None

    def _state_of(
        self, part: Optimizer, state_dict: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what `part` has of the whole state, cut and counted as `part` counts."""
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [tensor for group in part.param_groups for tensor in group["params"]]
        state: dict[int, Any] = {}
        for number, index in enumerate(self._indices_of(part)):
            entry = state_dict["state"].get(saved[index])
            if entry is not None:
                state[number] = _own_state(own[number], entry)
        groups: list[Group] = []
        start = 0
        pairs = zip(part.param_groups, state_dict["param_groups"], strict=True)
        for group, saved_group in pairs:
            stop = start + len(group["params"])
            groups.append(
                {**_settings(saved_group), "params": list(range(start, stop))}
            )
            start = stop
        return {"state": state, "param_groups": groups}


def _entered(model: nn.Module) -> Iterator[Tensor]:
    """Return the parameters, each known by its layer, also one that was assigned to it."""
    for layer in model.modules():
        if isinstance(layer, ParallelLayer):
            for name in layer.specs:
                remember(layer.tensor_of(name), layer, name)
    return model.parameters()


def _settings(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def _without_whole(group: Group, keeps_all: bool) -> Group:
    own = [tensor for tensor in group["params"] if keeps_all or is_sharded(tensor)]
    return {**group, "params": own}


def _whole_only(group: Group, keeps_any: bool) -> Group:
    own = [t for t in group["params"] if keeps_any and not is_sharded(t)]
    return {**group, "params": own}


def _has_parameters(groups: list[Group]) -> bool:
    return any(group["params"] for group in groups)


def _torch_zero() -> Any:
    """Return torch's class. Its package warns of torch.jit when it is imported (torch 2.13)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    return TorchZero


def _gathered_state(parameter: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter with whole tensors, on the CPU. Collective."""
    place = shard_owner_of(parameter)
    collected: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Tensor):
            if place is not None and value.dim() > 0:
                value = _gathered(key, value, *place)
            value = value.detach().clone().cpu()
        collected[key] = value
    return collected


def _gathered(key: str, value: Tensor, layer: Owner, name: str) -> Tensor:
    if tuple(value.shape) != layer.own_shape(name):
        raise StateError(
            f"The optimizer keeps {key!r} of shape {tuple(value.shape)} for {name} of"
            f" {type(layer).__name__}, whose shard is {layer.own_shape(name)}. Only tensors"
            " of the shard's shape can be put together."
        )
    return gathered(value, layer, name)


def _own_state(parameter: Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of one parameter's state with this rank's parts of its whole tensors."""
    place = shard_owner_of(parameter)
    own: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, Tensor):
            if place is not None and value.dim() > 0:
                layer, name = place
                value = layer.own_state(key, name, value)
            value = value.clone()
        own[key] = value
    return own
