"""Scaled dot product attention: heads, the batch, queries or value features may be divided.

    divided             result
    batch, heads        divided alike, local
    grouped heads       local: a query's head meets the key and value head that serves it, which
                        its rank holds; several ranks may hold one
    queries             divided alike, local; not if causal
    value features      divided alike, local; not with dropout
    keys, features      an error: each weight needs them all

Dropout is drawn from the rank's own random stream, as for every shard: masks of different
ranks are independent, and are not those that one device would draw. A compiled graph has one
stream for all ranks, so there attention with dropout goes by steps, of which dropout is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torchshard.distributed.random import shard_rng
from torchshard.layout import Ranges
from torchshard.tensor.operands import Division, Labels, Units, division, part
from torchshard.tensor.products import product
from torchshard.tensor.sharded import (
    ShardedTensor,
    Sharding,
    asked,
    bound,
    first_sharded,
    local_call,
    mark,
    mixes,
    rule,
    whole_shape,
)

_NAME = "scaled_dot_product_attention"
_REFUSED: dict[Hashable, str] = {
    "feature": "multiplies queries and keys over it",
    "key": "attends over it",
}
_ARGUMENTS: dict[str, Any] = {
    "query": None,
    "key": None,
    "value": None,
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "scale": None,
    "enable_gqa": False,
}


@rule([_NAME])
def _attention(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    given = dict(zip(_ARGUMENTS, bound(args, kwargs, **_ARGUMENTS), strict=True))
    query, key, value, mask = (given.pop(name) for name in list(_ARGUMENTS)[:4])
    drops = given["dropout_p"] > 0
    if drops and torch.compiler.is_compiling():
        return _by_steps(query, key, value, mask, given)

    def check(divided: Division) -> None:
        if divided.label == "query" and given["is_causal"]:
            raise mixes(_NAME, divided.sharding, "is causal by the place of a query")
        if divided.label == "value" and drops:
            raise mixes(_NAME, divided.sharding, "drops weights for all of it alike")

    def compute(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Any:
        own_mask = mask[0] if mask else None
        group = first_sharded([*args, *kwargs.values()]).sharding.group
        with shard_rng(group, query.device) if drops else nullcontext():
            result = func(query, key, value, own_mask, **given)
        if mask and mask[0].requires_grad and not result.numel():
            # torch 2.13 cuts an empty result off from its mask: others wait in backward.
            return result + mask[0].sum()
        return result

    factors = [query, key, value, *([] if mask is None else [mask])]
    num_kv = _num_kv_heads(factors) if given["enable_gqa"] else 0
    if num_kv and _is_cut(query, num_kv):
        given["enable_gqa"] = False
        return _served(compute, factors)
    labels = _labels(factors, num_kv)
    for factor, its_labels in zip(factors, labels, strict=True):
        _expect_local(factor, its_labels)
    num_dims = max(query.dim(), key.dim(), value.dim())
    head = labels[0][-3] if query.dim() > 2 else -3
    output = (*range(-num_dims, -3), head, "query", "value")[-num_dims:]
    return product(
        _NAME, compute, factors, labels, output, broadcasts=True, check=check
    )


def _by_steps(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    given: dict[str, Any],
) -> Tensor:
    """Attend as torch documents it, each step by its own rule; the weights are formed."""
    if given["enable_gqa"]:
        sharding = first_sharded([query, key, value, mask]).sharding
        raise mixes(_NAME, sharding, "of grouped heads cannot drop in a compiled graph")
    scale = given["scale"] or 1 / math.sqrt(query.shape[-1])
    scores = asked(torch.matmul, query, asked(torch.transpose, key, -2, -1))
    scores = asked(torch.mul, scores, scale)
    if given["is_causal"]:
        mask = torch.ones(
            whole_shape(scores)[-2:], dtype=torch.bool, device=query.device
        ).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = asked(torch.where, mask, scores, -math.inf)
    elif mask is not None:
        scores = asked(torch.add, scores, mask)
    weights = asked(torch.softmax, scores, -1)
    dropped = asked(F.dropout, weights, given["dropout_p"])
    return cast(Tensor, asked(torch.matmul, dropped, value))


def _expect_local(factor: Tensor, labels: Labels) -> None:
    """Check one operand: divided features of keys and of values are of different labels."""
    if isinstance(factor, ShardedTensor):
        label = labels[factor.sharding.dim]
        if label in _REFUSED:
            raise mixes(_NAME, factor.sharding, _REFUSED[label])


def _num_kv_heads(factors: list[Tensor]) -> int:
    """Return how many heads of keys and values serve several query heads; 0 if none does."""
    num_heads = [whole_shape(factor)[-3] for factor in factors[:3]]
    fewest = min(num_heads)
    return fewest if fewest < num_heads[0] else 0


def _labels(factors: list[Tensor], num_kv: int) -> list[Labels]:
    """Return the labels of query, key, value and mask; batch dims count from the back.

    Where no key head serves several query heads, `num_kv` 0, heads are a batch dim too.
    """
    ends = ("query", "feature"), ("key", "feature"), ("key", "value"), ("query", "key")
    labels: list[Labels] = []
    for factor, end in zip(factors, ends, strict=False):
        head: Hashable = -3
        if num_kv:
            counted = factors[0] if end == ends[3] else factor
            head = Units("key head", whole_shape(counted)[-3] // num_kv)
        full: Labels = (*range(-factor.dim(), -3), head, *end)
        labels.append(full[-factor.dim() :])
    return labels


def _is_cut(query: Tensor, num_kv: int) -> bool:
    """Return whether ranks hold some of the query heads that one key head serves."""
    if not isinstance(query, ShardedTensor) or query.sharding.dim != query.dim() - 3:
        return False
    ranges = query.sharding.ranges
    return ranges.in_units(ranges.size // num_kv) is None


def _served(compute: Callable[..., Tensor], factors: list[Tensor]) -> Tensor:
    """Attend where a key head serves query heads of several ranks: all of them hold it."""
    query, key, value, *mask = factors
    labels = _labels(factors, 0)
    divided = division(_NAME, (query, *mask), (labels[0], *labels[3:]))
    places = [_places(x, divided.sharding) for x in (key, value)]
    own = [_heads_at(*pair, divided) for pair in zip((key, value), places, strict=True)]
    own_mask = [part(_NAME, x, labels[3], divided, broadcasts=True) for x in mask]
    result = local_call(compute, (query, *own, *own_mask), {})
    return mark(result, divided.sharding.at(result.dim() - 3))


def _places(x: Tensor, queries: Sharding) -> list[int]:
    """Return where this rank holds the head of keys or values for each of its query heads.

    Raises:
        ShardedOpError: If some rank does not hold one that it needs.
    """
    num_heads, num_ranks = whole_shape(x)[-3], queries.group.size
    held = Ranges(num_heads, (((0, num_heads),),) * num_ranks)
    if isinstance(x, ShardedTensor):
        place = x.sharding.dim - x.dim(), x.sharding.group
        if place != (-3, queries.group):
            raise mixes(_NAME, x.sharding, _UNSERVED)
        held = x.sharding.ranges
    served = queries.ranges.size // num_heads
    found: list[list[int]] = []
    for rank, heads in enumerate(queries.ranges.per_rank):
        needed = [head // served for ends in heads for head in range(*ends)]
        places = [held.place(rank, head) for head in needed]
        found.append([place for place in places if place is not None])
        if len(found[-1]) < len(needed):
            raise mixes(_NAME, queries, _UNSERVED)
    return found[queries.group.rank]


_UNSERVED = (
    "needs the key and value heads of each rank's query heads there. Divide their layers in"
    " units of a head, those of keys and values with `serves`"
)


def _heads_at(x: Tensor, places: list[int], divided: Division) -> Tensor:
    """Return the heads at the given places of those that this rank holds."""
    own = part(_NAME, x, (), divided)
    index = torch.tensor(places, dtype=torch.int64, device=own.device)
    return cast(Tensor, local_call(torch.index_select, (own, own.dim() - 3, index), {}))
