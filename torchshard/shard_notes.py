"""Whose shards a state dict holds: a note in its metadata, and what is loaded without one.

A shape alone does not say whether a tensor is this rank's shard: a whole weight of another
model may have the same, and so has another rank's. `state_dict()` therefore notes the rank,
the number of ranks and the whole shapes where torch notes a module's version. The note is made
of numbers and strings, and is saved and loaded with the state, `weights_only` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torchshard.distributed.agreement import from_all_ranks
from torchshard.distributed.groups import ShardGroup
from torchshard.errors import StateError
from torchshard.owners import Owner
from torchshard.tensor.dtensors import is_dtensor

_NOTE = "torchshard"


def note_shards(layer: Owner, state_dict: Any, prefix: str) -> None:
    """Note in the metadata of `state_dict` whose shards the layer's tensors in it are."""
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        entry = dict(metadata.get(prefix[:-1], {}))
        metadata[prefix[:-1]] = {**entry, _NOTE: _note(layer)}


def without_notes(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the metadata of a state whose tensors are whole."""
    return {
        path: {key: value for key, value in entry.items() if key != _NOTE}
        for path, entry in metadata.items()
    }


def _note(layer: Owner) -> dict[str, Any]:
    shapes = {name: list(spec.shape) for name, spec in layer.specs.items()}
    return {"rank": layer.group.rank, "size": layer.group.size, "shapes": shapes}


def expect_own_shards(
    layer: Owner,
    state_dict: Mapping[str, Any],
    prefix: str,
    metadata: Mapping[str, Any],
) -> None:
    """Check that what has a shard's shape in the state is this rank's shard.

    A plain dict, of which nothing is known, is compared between the ranks: shards differ. For
    that every rank loads it, as every rank loads its own.

    Raises:
        StateError: If it is another rank's, or a whole tensor of another model.
    """
    shards = {
        prefix + name: name
        for name in layer.specs
        if layer.ranges_of(name) is not None
        and isinstance(state_dict.get(prefix + name), Tensor)
        and not is_dtensor(state_dict[prefix + name])  # which says itself what it is
    }
    if not set(metadata) - {"assign_to_params_buffers"}:
        given = {key: state_dict[key] for key in shards}
        wholes = {key: layer.specs[name].shape for key, name in shards.items()}
        expect_different(given, wholes, layer.group)
        return
    note = metadata.get(_NOTE)
    if note is None:
        for key, name in shards.items():
            _expect_whole(layer, key, name, state_dict[key])
        return
    verdicts = from_all_ranks(_verdict(layer, prefix, note), layer.group)
    wrong = [verdict for verdict in verdicts if verdict]
    if wrong:
        raise StateError(
            f"{'; '.join(wrong)}. Load on every rank what it saved itself, or whole state:"
            " torchshard.collect_state_dict(model)."
        )


def _expect_whole(layer: Owner, key: str, name: str, value: Tensor) -> None:
    shape, whole = tuple(value.shape), layer.specs[name].shape
    if shape != whole and shape == layer.own_shape(name):
        raise StateError(
            f"{key} has shape {shape}, that of rank {layer.group.rank}'s shard of"
            f" {whole}, in a state dict whose tensors are whole: it is the state of a"
            f" smaller layer. Expected {whole}, or the state_dict() of this layer."
        )


def _verdict(layer: Owner, prefix: str, note: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a note that came with this rank's state, or None."""
    ours = _note(layer)
    differ = [
        name
        for name in ours["shapes"].keys() & note["shapes"].keys()
        if ours["shapes"][name] != note["shapes"][name]
    ]
    if differ:
        return (
            f"rank {ours['rank']}: {prefix}{differ[0]} in the state is a shard of"
            f" {tuple(note['shapes'][differ[0]])}, here of"
            f" {tuple(ours['shapes'][differ[0]])}"
        )
    if (note["rank"], note["size"]) == (ours["rank"], ours["size"]):
        return None
    return (
        f"rank {ours['rank']} of {ours['size']} was given the shards that rank"
        f" {note['rank']} of {note['size']} had of {prefix[:-1] or type(layer).__name__}"
    )


def expect_different(
    given: Mapping[str, Tensor],
    wholes: Mapping[str, tuple[int, ...]],
    group: ShardGroup,
) -> None:
    """Check that tensors that all have a shard's shape are not the same on all ranks.

    Args:
        given: Tensors of a state dict that says nothing of whose they are.
        wholes: The whole shape that each is, or is a part of.
        group: The ranks, which all call.

    Raises:
        StateError: On every rank, if all were given the same.
    """
    seen = from_all_ranks({key: _seen(value) for key, value in given.items()}, group)
    varied = [key for key in given if len(set(seen[0].get(key, ()))) > 1]
    alike = [key for key in varied if all(seen[0][key] == one.get(key) for one in seen)]
    are_whole = (tuple(given[key].shape) == wholes[key] for key in alike)
    if varied and alike == varied and not any(are_whole):
        shapes = ", ".join(str(tuple(given[key].shape)) for key in alike)
        raise StateError(
            f"{', '.join(alike)}: the ranks were given the same tensors, of shape {shapes},"
            f" though each holds another shard of"
            f" {', '.join(str(wholes[key]) for key in alike)}. Load whole state, or on every"
            " rank its own shard."
        )


def _seen(value: Tensor) -> tuple[float, ...]:
    """Return some numbers that tell tensors apart: one alone if all elements are equal."""
    flat = value.detach().flatten()
    if value.is_meta or not flat.numel() or bool((flat == flat[0]).all()):
        return (0.0,)
    picked = [flat[0], flat[-1], flat[len(flat) // 2], flat.double().sum()]
    return (*(float(x) for x in picked), *value.shape)
