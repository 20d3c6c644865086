"""An optimizer's state of shards: divided with its parameters, and saved for what it is.

torch keeps an optimizer's state by parameter and knows of no layouts. What a shard's state is
becomes known here, through the optimizer's own hooks: its `state_dict()` notes whose shards it
holds, `torch.distributed.checkpoint` gets DTensors in their place, and `load_state_dict` takes
whole state as well as this rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from torchshard.distributed.agreement import from_all_ranks
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import GroupError, StateError
from torchshard.owners import Owner, shard_owner_of
from torchshard.shard_notes import expect_different
from torchshard.tensor.dtensors import in_form, is_dtensor, wanted_form

_Entry: TypeAlias = "tuple[Any, Owner, str]"
"""What a state dict calls a parameter, its layer, and its name there."""

_NOTE = "torchshard"
_watched: WeakSet[Optimizer] = WeakSet()
_changed = WeakIdKeyDictionary()
"""Parameters that a conversion has cut, or made whole, and that were there before."""
_num_changes = 0
_settled: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
"""How many changes an optimizer's state has seen."""


def watch_state(optimizer: Optimizer) -> None:
    """Have the optimizer's state dicts say what they hold of shards, from now on."""
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_post_hook(_described)
        optimizer.register_load_state_dict_pre_hook(_own_part)


def has_changed(parameter: Tensor) -> None:
    """Note that a conversion has changed the size of a parameter, which optimizers may hold."""
    global _num_changes
    _num_changes += 1
    _changed[parameter] = True


def divide_state(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before a step, cut the state that was made of parameters before they were divided.

    Raises:
        GroupError: If a tensor of the state has neither the whole shape nor the shard's.
    """
    if torch.compiler.is_compiling() or _settled.get(optimizer, -1) == _num_changes:
        return
    _settled[optimizer] = _num_changes
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            place = shard_owner_of(tensor)
            if place is not None:
                watch_state(optimizer)
                if tensor in _changed:
                    _divide(optimizer.state.get(tensor, {}), *place)


def _divide(state: dict[str, Any], layer: Owner, name: str) -> None:
    for key, value in state.items():
        is_of_whole = isinstance(value, Tensor) and value.dim() > 0
        if is_of_whole and value.shape != layer.own_shape(name):
            if value.shape != layer.specs[name].shape:
                raise GroupError(
                    f"The optimizer's {key} of {type(layer).__name__}.{name} has shape"
                    f" {tuple(value.shape)}, neither the whole's nor the shard's, so it"
                    " cannot be divided. Build the optimizer after the model is divided."
                )
            state[key] = layer.own_state(key, name, value)


def _entries(optimizer: Optimizer, state_dict: dict[str, Any]) -> Iterator[_Entry]:
    """Yield the shards that the optimizer holds, as the state dict calls them."""
    groups = (optimizer.param_groups, state_dict["param_groups"])
    held, names = (chain.from_iterable(g["params"] for g in side) for side in groups)
    for tensor, name in zip(held, names, strict=False):  # torch says what is missing
        place = shard_owner_of(tensor)
        if place is not None:
            yield name, *place


def _described(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with a note of whose it is, or in the form that a checkpoint wants."""
    entries, form = list(_entries(optimizer, state_dict)), wanted_form()
    if not entries:
        return state_dict
    if form == "local":
        return {**state_dict, _NOTE: _note(entries)}
    state = dict(state_dict["state"])
    for key, layer, name in entries:
        sharding = layer.sharding_of(name)
        if sharding is not None and key in state:
            state[key] = {
                what: in_form(value, sharding, form)
                if _is_laid_out_as(value, layer.own_shape(name))
                else value
                for what, value in state[key].items()
            }
    return {**state_dict, "state": state}


def _is_laid_out_as(value: Any, *shapes: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape in shapes


def _note(entries: list[_Entry]) -> dict[Any, list[Any]]:
    """Return the rank, the number of ranks and the whole shape of each shard."""
    return {
        key: [layer.group.rank, layer.group.size, list(layer.specs[name].shape)]
        for key, layer, name in entries
    }


def _own_part(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with this rank's part of what is whole.

    Raises:
        StateError: On every rank, if one was given another rank's state.
    """
    entries = list(_entries(optimizer, state_dict))
    if not entries:
        return state_dict
    if _NOTE in state_dict:
        _expect_no(_foreign_note(entries, state_dict[_NOTE]), entries)
    else:
        _expect_no(_foreign_shape(entries, state_dict["state"]), entries)
        _expect_different(entries, state_dict["state"])
    kept = {key: value for key, value in state_dict.items() if key != _NOTE}
    state = dict(state_dict["state"])
    for key, layer, name in entries:
        shapes = (layer.own_shape(name), layer.specs[name].shape)
        for what, value in state.get(key, {}).items():
            if is_dtensor(value) or _is_laid_out_as(value, *shapes):
                part = layer.own_state(f"{key}.{what}", name, value)
                state[key] = {**state[key], what: part}
    return {**kept, "state": state}


def _expect_no(fault: str, entries: list[_Entry]) -> None:
    """Raise what any rank found wrong, on all."""
    for group in _groups(entries):
        faults = [fault for fault in from_all_ranks(fault, group) if fault]
        if faults:
            raise StateError(
                f"{'; '.join(faults)}. Load on every rank what its optimizer saved itself,"
                " or state of the whole parameters."
            )


def _foreign_note(entries: list[_Entry], note: dict[Any, list[Any]]) -> str:
    """Return how a note differs from this rank's own."""
    ours = _note(entries)
    for key, own in ours.items():
        given = note.get(key, own)
        if list(given) != own:
            return (
                f"rank {own[0]} of {own[1]}, whose parameter {key} is a shard of"
                f" {tuple(own[2])}, was given the state of rank {given[0]} of {given[1]}'s"
                f" shard of {tuple(given[2])}"
            )
    return ""


def _foreign_shape(entries: list[_Entry], state: dict[Any, dict[str, Any]]) -> str:
    """Return which state has the shape of another rank's shard."""
    for key, layer, name in entries:
        spec, group = layer.specs[name], layer.group
        own = layer.own_shape(name)
        others = {spec.own_shape(rank) for rank in range(group.size)}
        for what, value in state.get(key, {}).items():
            if _is_laid_out_as(value, *(others - {own, spec.shape})):
                return (
                    f"rank {group.rank}: {what} of parameter {key} has shape"
                    f" {tuple(value.shape)}, that of another rank's shard of {spec.shape};"
                    f" expected {own}"
                )
    return ""


def _expect_different(entries: list[_Entry], state: dict[Any, dict[str, Any]]) -> None:
    """Compare between the ranks what came without a note: shards differ."""
    for group in _groups(entries):
        given, shapes = {}, {}
        for key, layer, name in entries:
            for what, value in state.get(key, {}).items():
                fits = _is_laid_out_as(value, layer.own_shape(name))
                if fits and not is_dtensor(value) and layer.group == group:
                    given[f"{key}.{what}"] = cast(Tensor, value)
                    shapes[f"{key}.{what}"] = layer.specs[name].shape
        expect_different(given, shapes, group)


def _groups(entries: list[_Entry]) -> list[ShardGroup]:
    return list(dict.fromkeys(layer.group for _, layer, _ in entries))
