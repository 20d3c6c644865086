"""Losses of one value an element: mean squares, binary cross-entropy, divergences, and kin.

Every value is computed where its element lies, by torch's own function, and the mean or the
sum over all of them is that of the whole: one all-reduce of a number.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as legacy
from torchshard.errors import ShapeError
from torchshard.tensor.elementwise import pointwise
from torchshard.tensor.sharded import (
    RULES,
    ShardedTensor,
    bound,
    first_sharded,
    mixes,
    rule,
    whole_shape,
)


def options_of(func: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a function of torch in their order, with their defaults."""
    parameters = inspect.signature(func).parameters
    return {
        name: None if one.default is one.empty else one.default
        for name, one in parameters.items()
    }


_SAME_SHAPES = {
    "binary_cross_entropy": "target",
    "binary_cross_entropy_with_logits": "target",
    "mse_loss": "weight",
    "l1_loss": "weight",
    "huber_loss": "weight",
}
"""The argument that has to have the shape of the input, where others may broadcast."""
_MEANS_BY_WEIGHT = "mse_loss", "l1_loss"
"""Those whose mean is weighted; others divide what is weighted by the number of elements."""
_ARGUMENTS = {
    name: options_of(getattr(F, name))
    for name in (
        *_SAME_SHAPES,
        "smooth_l1_loss",
        "kl_div",
        "poisson_nll_loss",
        "soft_margin_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
    )
}


@rule(_ARGUMENTS)
def _loss(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    name = func.__name__
    given = loss_arguments(func, _ARGUMENTS[name], args, kwargs)
    if name in _SAME_SHAPES:
        _expect_alike(name, given["input"], _SAME_SHAPES[name], given)
    if name == "l1_loss":
        _expect_no_lost_weight(given["input"], given["target"])
    reduction, weight = given["reduction"], given.get("weight")
    elements = cast(Tensor, pointwise(func, (), {**given, "reduction": "none"}))
    if reduction == "batchmean":
        return reduced(elements, "sum") / whole_shape(given["input"])[0]
    if reduction == "mean" and weight is not None and name in _MEANS_BY_WEIGHT:
        return reduced(elements, "sum") / reduced(weight, "sum")
    return reduced(elements, reduction)


def loss_arguments(
    func: Callable[..., Any],
    names: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of a loss by name; what it once called `reduction` is that now.

    Raises:
        ShardedOpError: If it is not the function of torch.nn.functional.
    """
    name = func.__name__
    if func is not getattr(F, name):
        sharding = first_sharded([*args, *kwargs.values()]).sharding
        why = f"of torch itself has no rule; use torch.nn.functional.{name}"
        raise mixes(name, sharding, why)
    given = dict(zip(names, bound(args, kwargs, **names), strict=True))
    old = given.pop("size_average", None), given.pop("reduce", None)
    if old != (None, None):
        given["reduction"] = legacy.legacy_get_string(*old)
    if given["reduction"] not in ("none", "mean", "sum", "batchmean"):
        legacy.get_enum(given["reduction"])  # torch's own error
    return given


def reduced(elements: Tensor, reduction: str) -> Tensor:
    """Return the mean or the sum over all elements of the whole, or the elements."""
    if reduction == "none":
        return elements
    total = torch.sum if reduction == "sum" else torch.mean
    if isinstance(elements, ShardedTensor):
        return cast(Tensor, RULES[reduction](total, (elements,), {}))
    return total(elements)


def _expect_alike(name: str, x: Tensor, key: str, given: dict[str, Any]) -> None:
    """Check that an argument has the whole shape of the input.

    Raises:
        ShapeError: If it has not: on a rank whose part is of size 1, torch would not see it.
    """
    other = given[key]
    if other is not None and whole_shape(other) != whole_shape(x):
        raise ShapeError(
            f"{name}: {key} has shape {tuple(whole_shape(other))} and the input"
            f" {tuple(whole_shape(x))}. Expected the same shape."
        )


def _expect_no_lost_weight(*operands: Tensor) -> None:
    """Check that l1_loss has no weight: torch 2.13 hands it on to no tensor subclass.

    Raises:
        ShardedOpError: If it has one.
    """
    if torch.compiler.is_compiling():
        return
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    if frame.f_locals.get("weight") is not None:
        sharding = first_sharded(operands).sharding
        raise mixes(
            "l1_loss", sharding, "with a weight has no rule; weigh its elements"
        )
