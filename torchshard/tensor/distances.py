"""Distances and similarities along one dim, made of sums that have rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torchshard.tensor.sharded import (
    asked,
    bound,
    first_sharded,
    mixes,
    rule,
    whole_shape,
)


@rule(["pairwise_distance"])
def _pairwise_distance(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The p-norm of x1 - x2 + eps over the last dim."""
    names = {"x1": None, "x2": None, "p": 2.0, "eps": 1e-6, "keepdim": False}
    x1, x2, p, eps, keepdim = _pair(args, kwargs, names)
    apart = asked(torch.add, asked(torch.sub, x1, x2), eps)
    return cast(Tensor, asked(torch.norm, apart, p, -1, keepdim))


@rule(["cosine_similarity"])
def _cosine_similarity(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """The sum of x1 * x2 over a dim, each divided by its norm, which is at least eps."""
    x1, x2, dim, eps = _pair(
        args, kwargs, {"x1": None, "x2": None, "dim": 1, "eps": 1e-8}
    )
    num_dims = max(x1.dim(), x2.dim())
    dim = dim - num_dims if dim >= 0 else dim
    if len({_size(x, dim) for x in (x1, x2)}) > 1:
        why = "of tensors that broadcast along the dim it sums over has no rule"
        raise mixes("cosine_similarity", first_sharded((x1, x2)).sharding, why)
    products = asked(torch.mul, x1, x2)  # first: it is refused before any collective
    cosine = asked(torch.sum, products, dim)
    for x in (x1, x2):
        length = asked(torch.clamp_min, asked(torch.norm, x, 2, dim), eps)
        cosine = asked(torch.div, cosine, length)
    return cast(Tensor, cosine)


def _size(x: Tensor, dim: int) -> int:
    """Return the whole size of a dim that counts from the back; 1 if there is no such dim."""
    return whole_shape(x)[dim] if x.dim() >= -dim else 1


def _pair(
    args: tuple[Any, ...], kwargs: dict[str, Any], names: dict[str, Any]
) -> list[Any]:
    """Return the arguments in order; the dispatcher reads x1 by no other name."""
    given = {"x2" if name == "other" else name: value for name, value in kwargs.items()}
    return bound(args, given, **names)
