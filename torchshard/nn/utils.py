"""Mirror of torch.nn.utils: the gradient norm of a model of which ranks hold shards.

Every rank of the shards' groups calls these functions with the same parameters in the same
order. One small all-gather for each group, whatever the number of parameters; gradients that
FSDP has divided as well, DTensors, take one all-reduce each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torchshard.distributed import collectives
from torchshard.distributed.groups import ShardGroup
from torchshard.layer import ParallelLayer
from torchshard.layout import Shard
from torchshard.owners import Owner, shard_owner_of
from torchshard.row_updates import expect_whole_gradients

__all__ = ["clip_grad_norm_", "get_total_norm"]

Parameters: TypeAlias = "nn.Module | Tensor | Iterable[Tensor]"
_Place: TypeAlias = "tuple[Owner, str] | None"


@torch.no_grad()
def clip_grad_norm_(
    model: Parameters,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients in place so that their norm over all ranks is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` of the dense model, whose factor is the same on every
    rank. Gradients that were scaled for mixed precision are unscaled first, as in torch.

    Args:
        model: The model, or its parameters.
        max_norm: Largest norm.
        norm_type: The p of the norm; `math.inf` for the largest absolute value.
        error_if_nonfinite: Whether a norm that is infinite or no number is an error.
        foreach: As for `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before clipping, a number, equal on all ranks. In float64 if a parameter is,
        otherwise in float32.

    Raises:
        RuntimeError: On all ranks, if the norm is not finite and `error_if_nonfinite`.

    Example:
        >>> layer = nn.Linear(3, 4, bias=False)
        >>> layer.weight.grad = torch.ones(4, 3)
        >>> clip_grad_norm_(layer, max_norm=1.0)
        tensor(3.4641)
    """
    places = _places(model)
    total = _total_norm(places, norm_type, error_if_nonfinite)
    torch.nn.utils.clip_grads_with_norm_(
        [parameter for parameter, _ in places], max_norm, total, foreach
    )
    return total


@torch.no_grad()
def get_total_norm(
    model: Parameters, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Return the norm of all gradients of the whole model, equal on all ranks.

    Shards are summed over the ranks that hold them, each index once; parameters that every
    rank holds whole count once, and so do tied ones.

    Args:
        model: The model, or its parameters. (torch's function of this name takes gradients;
            a gradient does not know what it is a shard of.)
        norm_type: The p of the norm.
        error_if_nonfinite: Whether a norm that is infinite or no number is an error.

    Raises:
        RuntimeError: On all ranks, if the norm is not finite and `error_if_nonfinite`.
    """
    return _total_norm(_places(model), norm_type, error_if_nonfinite)


def _places(model: Parameters) -> list[tuple[Tensor, _Place]]:
    """Return each parameter once, with its layer and name there if it is a shard."""
    if isinstance(model, nn.Module):
        owned = {id(tensor): place for tensor, place in _shards(model)}
        return [(tensor, owned.get(id(tensor))) for tensor in model.parameters()]
    given = [model] if isinstance(model, Tensor) else model
    unique = {id(tensor): tensor for tensor in given}
    return [(tensor, shard_owner_of(tensor)) for tensor in unique.values()]


def _shards(model: nn.Module) -> Iterator[tuple[Tensor, _Place]]:
    for layer in model.modules():
        if isinstance(layer, ParallelLayer) and layer.group.size > 1:
            for name in layer.specs:
                if layer.ranges_of(name) is not None:
                    yield layer.tensor_of(name), (layer, name)


def _total_norm(
    places: list[tuple[Tensor, _Place]], norm_type: float, error_if_nonfinite: bool
) -> Tensor:
    expect_whole_gradients((parameter for parameter, _ in places), "A total norm")
    norm_type = float(norm_type)
    dtypes = {parameter.dtype for parameter, _ in places}
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    whole: list[Tensor] = []
    by_group: dict[ShardGroup, list[Tensor]] = {}
    for parameter, place in places:
        norms = whole if place is None else by_group.setdefault(place[0].group, [])
        norms.append(_own_norm(parameter, place, norm_type, dtype))
    for group, norms in by_group.items():
        # By rank and parameter. Norms, not powers, which would overflow.
        own = torch.stack([norm.to(norms[0].device) for norm in norms])
        ranks = collectives.stack(own, group)
        whole.extend(torch.linalg.vector_norm(ranks, norm_type, dim=0))
    if not whole:
        return torch.tensor(0.0)
    devices = {norm.device for norm in whole}
    device = max(devices, key=lambda device: (device.type != "cpu", str(device)))
    stacked = torch.stack([norm.to(device) for norm in whole])
    total: Tensor = torch.linalg.vector_norm(stacked, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is {total.item()}, so they"
            " cannot be clipped. Look for the overflow, or pass error_if_nonfinite=False to"
            " scale them by it anyway."
        )
    return total


def _own_norm(
    parameter: Tensor, place: _Place, norm_type: float, dtype: torch.dtype
) -> Tensor:
    """Return the norm of what this rank counts of the gradient.

    What has no elements, or no gradient, is neutral: it changes no norm.
    """
    elements = None if parameter.grad is None else _counted(parameter.grad, place)
    if elements is None or elements.numel() == 0:
        neutral = 0.0 if norm_type >= 0 else math.inf
        return torch.full((), neutral, dtype=dtype, device=parameter.device)
    if elements.is_complex():
        elements = elements.abs()
    norm = torch.linalg.vector_norm(elements, norm_type, dtype=dtype)
    return _without_dtensor(norm)


def _counted(grad: Tensor, place: _Place) -> Tensor:
    """Return the elements of the gradient that this rank counts, in any order."""
    overlaps = place is not None and _overlaps(*place)
    if grad.is_sparse:
        grad = grad.to_dense() if overlaps else grad.coalesce().values()
    if place is None or not overlaps:
        return grad
    layer, name = place
    layout, ranges = layer.specs[name].layout, layer.ranges_of(name)
    if ranges is None or not isinstance(layout, Shard):
        return grad
    mask = collectives.kept_mask(ranges, layer.group, 1, 0, grad.device)
    return grad.index_select(layout.dim, mask.nonzero().flatten())


def _overlaps(layer: Owner, name: str) -> bool:
    ranges = layer.ranges_of(name)
    return ranges is not None and ranges.overlaps


def _without_dtensor(norm: Tensor) -> Tensor:
    """Return the norm of a gradient that FSDP has divided as a plain number."""
    from torch.distributed.tensor import DTensor

    return norm.full_tensor() if isinstance(norm, DTensor) else norm
