"""What ranks tell one another of a value: in words, and a tensor's elements as a digest.

A digest is sixteen bytes whatever the size, so that a check costs no more than a message. Equal
digests are equal values; others may still be (0.0 and -0.0, two nans), which is for the caller
to look at.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

_SAID = (bool, int, float, complex, bytes, slice, torch.dtype, type(...))


class Fact(NamedTuple):
    """What is told of one value.

    Attributes:
        words: Shape, dtype and whether it wants a gradient; of other values what they are.
        digest: Of the elements of a whole tensor; None where there is nothing to compare.
    """

    words: str
    digest: bytes | None = None


def facts_of(
    values: Mapping[str, Any], pooled: Iterable[str] = ()
) -> dict[str, tuple[Fact, Any]]:
    """Return the fact and the value of everything in `values`, lists and dicts taken apart.

    Args:
        values: By name.
        pooled: Names of tensors that hold each rank's own samples along dim 0.
    """
    own = set(pooled)
    return {
        name + keystr(path): (_fact(leaf, name in own), leaf)
        for name, value in values.items()
        for path, leaf in tree_flatten_with_path(value)[0]
    }


def _fact(value: Any, is_pooled: bool) -> Fact:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return _fact_of_tensor(value, is_pooled)
    if isinstance(value, str):
        return Fact(value)
    if value is None or isinstance(value, _SAID):
        return Fact(repr(value))
    return Fact(type(value).__qualname__)


def _fact_of_tensor(x: Tensor, is_pooled: bool) -> Fact:
    grad = ", wants grad" if x.requires_grad and torch.is_grad_enabled() else ""
    sharding = vars(x).get("sharding")
    if sharding is not None:
        shape = (*x.shape[: sharding.dim], sharding.ranges.size)
        shape += tuple(x.shape[sharding.dim + 1 :])
        lengths = sharding.ranges.lengths
        words = f"{shape} in shards of {lengths} along dim {sharding.dim}"
        return Fact(f"{words}, {x.dtype}{grad}")
    if is_pooled:
        rest = ", ".join(["*", *map(str, x.shape[1:])])
        return Fact(f"({rest}), {x.dtype}{grad}")
    return Fact(f"{tuple(x.shape)}, {x.dtype}{grad}", _digest(x))


def elements_of(x: Tensor) -> Tensor | None:
    """Return the elements of `x` on the CPU, or None where it has none that can be read."""
    is_plain = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    if x.is_meta or not is_plain or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    x = x.detach()
    if x.layout is not torch.strided:
        x = x.to_dense()
    return x.resolve_conj().resolve_neg().cpu().contiguous()


def _digest(x: Tensor) -> bytes | None:
    elements = elements_of(x)
    if elements is None:
        return None
    size = elements.numel() * elements.element_size()
    memory = (ctypes.c_char * size).from_address(elements.data_ptr()) if size else b""
    return hashlib.blake2b(memory, digest_size=16).digest()
