"""What the ranks compare before an operation on shards, under TORCHSHARD_DEBUG=1."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor
from torch.overrides import get_testing_overrides
from torch.utils._pytree import tree_leaves
from torchshard.distributed.agreement import expect_alike, is_on
from torchshard.distributed.running import where_it_runs

_FREE = frozenset(
    """
    __get__ __set__ size __len__ numel nelement __format__ __repr__ __deepcopy__ dim ndimension
    stride storage_offset is_contiguous is_floating_point is_complex is_signed element_size
    data_ptr untyped_storage get_device __hash__ __delete__ requires_grad_ retain_grad
    register_hook register_post_accumulate_grad_hook is_pinned _is_view __reduce_ex__
    is_inference is_set_to has_names to type_as cpu cuda backward grad
    """.split()
)
"""What a rank may do alone: read facts, print, move a shard, hand in a shard's gradient."""


def expect_same_operands(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Check that all ranks call the operation `func`, with the same other operands.

    What is given shards alone and moves nothing between ranks has nothing to compare.

    Raises:
        GroupError: On every rank, if not; it says what differs on which.
    """
    name = func.__name__
    if name in _FREE or not is_on():
        return
    leaves = tree_leaves((args, kwargs))
    shards = [x for x in leaves if isinstance(x, Tensor) and "sharding" in vars(x)]
    group = shards[0].sharding.group if shards else None  # type: ignore[attr-defined]
    if group is None or len(shards) == len(leaves):
        return
    named = dict(zip(_names(func, len(args)), args, strict=True))
    expect_alike(f"{name}{where_it_runs()}", {**named, **kwargs}, group)


def _names(func: Callable[..., Any], count: int) -> list[str]:
    """Return names for arguments given by position, as torch lists them for overrides."""
    twin = get_testing_overrides().get(func)
    known = [] if twin is None else signature(twin).parameters.values()
    names = [one.name for one in known if one.kind is one.POSITIONAL_OR_KEYWORD]
    names = ["input" if name == "self" else name for name in names[:count]]
    return names + [f"argument {i}" if i else "input" for i in range(len(names), count)]
