"""Operations that have no rule in the engine, and the product that computes each of them.

A rule looks at which dims of the operands are sharded. It answers with a `Change` only where
the result is exactly that of the whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torchshard as ts
from torch import Tensor

from .carry import Change


def product_for(
    function: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> Change | None:
    """What computes the result of `function` from shards, if something here does."""
    if not _is_torchs(function):
        return None
    name = getattr(function, "__name__", "")
    is_plain = all(isinstance(arg, _OPERAND | None) for arg in args)
    if name == "normalize" and is_plain:
        return _normalize(name, args, **named)
    find = _PRODUCTS.get(name)
    if find is None or not is_plain or not named.keys() <= _LOCAL_OPTIONS:
        return None
    return find(name, args)


_LOCAL_OPTIONS = {"padding", "stride", "dilation", "p"}
"""Keywords that do not touch the sharded dim."""


def _is_torchs(function: Callable[..., Any]) -> bool:
    """Whether a function is torch's own, and not a person's of the same name."""
    module = getattr(function, "__module__", None) or "torch"
    return module.partition(".")[0] in ("torch", "_operator")


_OPERAND = Tensor | str | int | float


def _dim(value: Any) -> int | None:
    """The sharded dim, counted from the back; None for what is whole."""
    if isinstance(value, ts.ShardedTensor):
        return value.sharding.dim - value.dim()
    return None


def _linear(name: str, args: Sequence[Any]) -> Change | None:
    x, weight, *rest = args
    bias = rest[0] if rest else None
    if (_dim(x), _dim(weight)) == (-1, -1) and _dim(bias) is None:
        return Change("row_linear")
    is_column = (_dim(x), _dim(weight)) == (None, -2)
    if is_column and (bias is None or _dim(bias) == -1):
        return Change("on_shards", "F.linear", at=-1)
    return None


def _matmul(name: str, args: Sequence[Any]) -> Change | None:
    left, right = args
    if min(left.dim(), right.dim()) < 2:
        return None
    dims = (_dim(left), _dim(right))
    if dims == (None, -1):
        return Change("on_shards", "torch.matmul", at=-1)
    if dims == (-2, None):
        return Change("on_shards", "torch.matmul", at=-2)
    return Change("summed", "torch.matmul") if dims == (-1, -2) else None


def _einsum(name: str, args: Sequence[Any]) -> Change | None:
    equation, *tensors = args
    if not isinstance(equation, str) or "->" not in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    terms = inputs.split(",")
    letters = {
        term[_dim(one)] if _after_dots(term, one) else "."  # type: ignore[index]
        for term, one in zip(terms, tensors, strict=True)
        if _dim(one) is not None
    }
    if len(letters) != 1 or "." in letters:
        return None
    (letter,) = letters
    if any(term.count(letter) > 1 for term in terms):
        return None
    if any(
        letter in term and _dim(one) is None
        for term, one in zip(terms, tensors, strict=True)
    ):
        return None
    if letter not in output:
        return Change("summed", "torch.einsum")
    place = output.index(letter) - len(output)
    return (
        None
        if "..." in output[place:]
        else Change("on_shards", "torch.einsum", at=place)
    )


def _after_dots(term: str, value: Any) -> bool:
    """Whether the sharded dim of `value` has a letter that its place from the back finds."""
    dim = _dim(value)
    return dim is not None and -dim <= len(term.rpartition("...")[2])


def _cdist(name: str, args: Sequence[Any]) -> Change | None:
    is_column = len(args) == 2 and (_dim(args[0]), _dim(args[1])) == (None, -2)
    return Change("on_shards", "torch.cdist", at=-1) if is_column else None


def _embedding(name: str, args: Sequence[Any]) -> Change | None:
    if len(args) != 2 or _dim(args[0]) is not None:
        return None
    if _dim(args[1]) == -1:
        return Change("on_shards", "F.embedding", at=-1)
    return Change("embedding") if _dim(args[1]) == -2 else None


def _getitem(name: str, args: Sequence[Any]) -> Change | None:
    table, index = args
    is_index = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
    if not is_index or not isinstance(table, ts.ShardedTensor):
        return None
    if table.sharding.dim == 0:
        return Change("lookup")
    return Change("on_shards", "operator.getitem", at=_dim(table))


def _bilinear(name: str, args: Sequence[Any]) -> Change | None:
    left, right, weight, *rest = args
    bias = rest[0] if rest else None
    is_column = (_dim(left), _dim(right), _dim(weight)) == (None, None, -3)
    is_column = is_column and (bias is None or _dim(bias) == -1)
    return Change("on_shards", "F.bilinear", at=-1) if is_column else None


def _conv(name: str, args: Sequence[Any]) -> Change | None:
    x, weight, *rest = args
    bias = rest[0] if rest else None
    groups = rest[4] if len(rest) > 4 else 1
    num_dims = int(name[-2])
    is_column = (_dim(x), _dim(weight)) == (None, -num_dims - 2) and groups == 1
    is_column = is_column and (bias is None or _dim(bias) == -1)
    return Change("on_shards", f"F.{name}", at=-num_dims - 1) if is_column else None


def _normalize(
    name: str, args: Sequence[Any], dim: Any = 1, **named: Any
) -> Change | None:
    x, dim = args[0], args[2] if len(args) > 2 else dim
    held = _dim(x)
    if held is None or not isinstance(dim, int) or dim % x.dim() == held % x.dim():
        return None
    return Change("on_shards", "F.normalize", at=held)


_PRODUCTS: dict[str, Callable[[str, Sequence[Any]], Change | None]] = {
    "linear": _linear,
    "matmul": _matmul,
    "einsum": _einsum,
    "cdist": _cdist,
    "embedding": _embedding,
    "getitem": _getitem,
    "bilinear": _bilinear,
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
}
