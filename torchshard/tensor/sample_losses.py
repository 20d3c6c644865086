"""Losses of one value a sample: nll_loss, margins, CTC, and cross-entropy of divided samples.

divided                 result
samples, positions      local; the mean or the sum is that of the whole
classes: nll_loss       the rank that holds a target's class picks it: one all-reduce
classes, features       other losses: an error, as a sample's value needs them all
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.checks import expect_indices
from torchshard.distributed import collectives
from torchshard.errors import TargetError
from torchshard.tensor.composed import python_code
from torchshard.tensor.lookups import never_empty, own_ids
from torchshard.tensor.losses import loss_arguments, options_of, reduced
from torchshard.tensor.operands import Division, Labels
from torchshard.tensor.products import product
from torchshard.tensor.sharded import (
    RULES,
    ShardedTensor,
    first_sharded,
    mixes,
    rule,
    whole_shape,
)

_NEEDS_ALL: dict[Hashable, str] = {
    "class": "compares all classes of a sample",
    "feature": "compares all features of a sample",
    "time": "follows a sample through it",
    "place": "needs all targets of a sample",
}
_NLL = options_of(F.nll_loss)
_CROSS_ENTROPY = options_of(F.cross_entropy)


@rule(["nll_loss"])
def _nll_loss(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = loss_arguments(func, _NLL, args, kwargs)
    return _class_loss("nll_loss", F.nll_loss, given)


def cross_entropy(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Return the cross-entropy of logits divided at another dim than their classes."""
    given = loss_arguments(func, _CROSS_ENTROPY, args, kwargs)
    return _class_loss("cross_entropy", F.cross_entropy, given)


def _class_loss(
    name: str, func: Callable[..., Tensor], given: dict[str, Any]
) -> Tensor:
    """Return a loss of class indices, or of probabilities: their mean is by weight."""
    x, target, weight = (given.pop(key) for key in ("input", "target", "weight"))
    reduction = given.pop("reduction")
    samples: Labels = tuple(range(x.dim() - 1))
    labels: Labels = (*samples[:1], "class", *samples[1:])
    indices = _are_indices(x, target)
    factors, names = [x, target], [labels, samples if indices else labels]
    if weight is not None:
        factors, names = [*factors, weight], [*names, ("class",)]
    rows: list[Division] = []

    def check(divided: Division) -> None:
        if name != "nll_loss":
            divided.expect_not(name, _NEEDS_ALL)
        if indices:
            _expect_targets(target, whole_shape(x)[labels.index("class")], given)
        rows.append(divided)

    def compute(x: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        own = weight[0] if weight else None
        if rows[0].label == "class":
            return _picked(x, target, own, given["ignore_index"], rows[0])
        values = func(x, target, own, reduction="none", **given)
        return torch.stack([values, _weights(values, target, own, given)], -1)

    pairs = product(name, compute, factors, names, (*samples, "pair"), check=check)
    values, weights = _unbound(pairs)
    if reduction != "mean":
        return reduced(values, reduction)
    return reduced(values, "sum") / reduced(weights, "sum")


def _are_indices(x: Tensor, target: Tensor) -> bool:
    """Return whether a target holds classes: one of probabilities is as large as the input."""
    return whole_shape(target) != whole_shape(x) or not target.is_floating_point()


def _unbound(pairs: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(pairs, ShardedTensor):
        first, second = RULES["unbind"](torch.unbind, (pairs, -1), {})
        return first, second
    return pairs[..., 0], pairs[..., 1]


def _weights(
    values: Tensor, target: Tensor, weight: Tensor | None, given: dict[str, Any]
) -> Tensor:
    """Return what each sample counts in a mean."""
    if target.is_floating_point():
        return torch.ones_like(values)
    counts = torch.ne(target, given["ignore_index"])
    if weight is None:
        return counts.to(values.dtype)
    classes = torch.where(counts, target, 0).long()
    own = weight.index_select(0, classes.flatten()).view_as(values)
    return torch.where(counts, own, torch.zeros_like(own))


def _picked(
    x: Tensor, target: Tensor, weight: Tensor | None, ignored: int, divided: Division
) -> Tensor:
    """Return values and weights of the targets whose class this rank holds; else zeros."""
    rows, dim = divided.sharding, min(x.dim() - 1, 1)
    own, places = own_ids(target.long(), rows)
    own = own & (target != ignored)
    columns = never_empty(x.movedim(dim, 0), rows).movedim(0, dim)
    values = -columns.gather(dim, places.unsqueeze(dim)).squeeze(dim)
    weights = torch.ones_like(values)
    if weight is not None:
        weights = never_empty(weight, rows)[places]
    pair = torch.stack([values * weights, weights], -1)
    return torch.where(own.unsqueeze(-1), pair, 0)


def _expect_targets(target: Tensor, size: int, given: dict[str, Any]) -> None:
    """Check that all targets are classes, alike on all ranks.

    Raises:
        TargetError: If one is not.
    """
    ignored = given["ignore_index"]
    if not isinstance(target, ShardedTensor) or torch.compiler.is_compiling():
        expect_indices(target, size, "target", ignored)
        return
    local = target.to_local()
    bad = ((local < 0) | (local >= size)) & (local != ignored)
    if collectives.all_reduce(bad.any().int(), target.sharding.group, "max"):
        raise TargetError(
            f"target holds a class out of range. Expected indices from 0 to {size - 1},"
            f" or ignore_index={ignored}."
        )


def _of_samples(
    name: str,
    func: Callable[..., Tensor],
    operands: dict[str, Tensor],
    labels: dict[str, Labels],
    output: Labels,
    given: dict[str, Any],
) -> Tensor:
    """Return the value of each sample, of operands that are divided at the samples."""

    def check(divided: Division) -> None:
        divided.expect_not(name, _NEEDS_ALL)
        if name == "ctc_loss":
            divided.expect_some(name)

    def compute(*own: Tensor) -> Tensor:
        return func(**dict(zip(operands, own, strict=True)), **given)

    names = [labels[key] for key in operands]
    return product(
        name,
        compute,
        tuple(operands.values()),
        names,
        output,
        broadcasts=True,
        check=check,
    )


_MARGINS = {
    name: options_of(getattr(F, name))
    for name in (
        "multi_margin_loss",
        "multilabel_margin_loss",
        "cosine_embedding_loss",
        "triplet_margin_loss",
    )
}
_LAST: dict[str, str] = {
    **dict.fromkeys(("multi_margin_loss", "multilabel_margin_loss"), "class"),
    **dict.fromkeys(("cosine_embedding_loss", "triplet_margin_loss"), "feature"),
}
"""What the last dim of a sample counts."""


@rule(_MARGINS)
def _margin_loss(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    name = func.__name__
    given = loss_arguments(func, _MARGINS[name], args, kwargs)
    reduction = given.pop("reduction")
    operands = {key: x for key, x in given.items() if isinstance(x, Tensor)}
    num_dims = max(x.dim() for x in operands.values())
    full: Labels = (*range(1 - num_dims, 0), _LAST[name])
    labels = {key: full[num_dims - x.dim() :] for key, x in operands.items()}
    if name in ("multi_margin_loss", "cosine_embedding_loss") and "target" in labels:
        labels["target"] = full[: operands["target"].dim()]
    rest = {key: x for key, x in given.items() if key not in operands}
    rest["reduction"] = "none"
    return reduced(
        _of_samples(name, func, operands, labels, full[:-1], rest), reduction
    )


_CTC = options_of(F.ctc_loss)


@rule(["ctc_loss"])
def _ctc_loss(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Each sample's sequence is one rank's; targets stand in rows, not end to end."""
    given = loss_arguments(func, _CTC, args, kwargs)
    reduction = given.pop("reduction")
    operands = {key: torch.as_tensor(given.pop(key)) for key in list(_CTC)[:4]}
    probabilities, targets = operands["log_probs"], operands["targets"]
    labels: dict[str, Labels] = dict.fromkeys(operands, (0,))
    labels["log_probs"] = ("time", 0, "class")
    labels["targets"] = (0, "place")
    if probabilities.dim() != 3 or targets.dim() != 2:
        sharding = first_sharded(operands.values()).sharding
        why = "needs a batch of log_probs, and targets in rows, to be divided"
        raise mixes("ctc_loss", sharding, why)

    def each(target_lengths: Tensor, **own: Any) -> Tensor:
        losses = F.ctc_loss(target_lengths=target_lengths, **own, reduction="none")
        if reduction != "mean":
            return losses
        return losses / target_lengths.to(losses).clamp_min(1)

    return reduced(
        _of_samples("ctc_loss", each, operands, labels, (0,), given), reduction
    )


@rule(["linear_cross_entropy"])
def _linear_cross_entropy(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Run torch's steps; its options, which spare memory by chunks, change no number."""
    steps = python_code(func)
    if steps is None or torch.compiler.is_compiling():
        sharding = first_sharded([*args, *kwargs.values()]).sharding
        raise mixes("linear_cross_entropy", sharding, "has no rule in compiled graphs")
    return cast(Tensor, steps(*args, **{**kwargs, "options": None}))
