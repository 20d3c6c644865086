"""Top classes and accuracy of logits whose classes are sharded, without gathering them.

Ties go to the class that comes first, as `argmax` has it. `torch.topk` leaves open which of
equal values it takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchshard.distributed import collectives
from torchshard.distributed.agreement import expect_alike
from torchshard.errors import LayoutError, ShapeError
from torchshard.loss.criterion import Criterion, expect_target, own_targets
from torchshard.loss.cross_entropy import class_sharding, expect_class_dim
from torchshard.loss.rows import as_rows, blocks
from torchshard.tensor.reductions import first_topk
from torchshard.tensor.sharded import ShardedTensor, Sharding, whole_shape, wrapped_dim


def parallel_topk(input: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return the k largest values along `dim` and their indices, in descending order.

    Over a sharded dim every rank offers its k best: k values and indices of each row are
    gathered, never the tensor. Of equal values the ones with the lower indices are taken, in
    their order, at any number of ranks.

    Args:
        input: A ShardedTensor, or a whole, plain tensor.
        k: How many.
        dim: Along which dim.

    Returns:
        Values and indices, whole along `dim`. Values are differentiable.

    Raises:
        ShapeError: If `dim` has fewer than `k` indices.

    Example:
        >>> parallel_topk(torch.tensor([[3.0, 1.0, 3.0, 2.0]]), 2)[1]
        tensor([[0, 2]])
    """
    dim = wrapped_dim(input, dim)
    size = whole_shape(input)[dim]
    if not 0 <= k <= size:
        raise ShapeError(
            f"k={k} is out of range. Expected 0 to {size}, the size of dim {dim}."
        )
    if isinstance(input, ShardedTensor) and input.sharding.dim == dim:
        values, indices = input.topk(k, dim)
        return values, indices
    return first_topk(input, k, dim)


def parallel_accuracy(
    input: Tensor,
    target: Tensor,
    topk: Sequence[int] = (1,),
    *,
    ignore_index: int = -100,
) -> list[Tensor]:
    """Return the shares of rows whose target is among the k highest logits, for each k.

    Two all-reduces of one number a row, whatever the ks: the target's logit, and how many
    classes are ahead of it.

    Args:
        input: Logits, `(N, C)`, `(N, C, d1, ...)` or `(C,)`, sharded on the class dim, or
            whole, a plain tensor.
        target: Class indices, `(N,)`, `(N, d1, ...)` or `()`.
        topk: The ks.
        ignore_index: Target value whose rows do not count.

    Returns:
        One scalar from 0 to 1 for each k, the same on every rank; nan if no row counts.

    Raises:
        ShapeError: If the shapes do not fit.
        TargetError: If a target is neither a class nor `ignore_index`.
        LayoutError: If a k is less than 1.
        ShardedOpError: If another dim than the class dim is sharded.

    Example:
        >>> logits = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
        >>> parallel_accuracy(logits, torch.tensor([1, 1]), topk=(1, 2))
        [tensor(0.5000), tensor(1.)]
    """
    if any(k < 1 for k in topk):
        raise LayoutError(f"topk={tuple(topk)} holds a number below 1.")
    sharding = class_sharding(input)
    given = {
        "input": input,
        "target": target,
        "topk": topk,
        "ignore_index": ignore_index,
    }
    expect_alike("parallel_accuracy", given, sharding.group)
    expect_class_dim("parallel_accuracy", input, sharding)
    if target.is_floating_point():
        raise ShapeError("target holds probabilities; accuracy needs class indices.")
    expect_target(target, whole_shape(input), Criterion(ignore_index), sharding)
    target = target.long()
    ahead = _classes_ahead(input, target, sharding)
    live = (target != ignore_index).to(torch.float32)
    return [((ahead < k) * live).sum() / live.sum() for k in topk]


@torch.no_grad()
def _classes_ahead(input: Tensor, target: Tensor, sharding: Sharding) -> Tensor:
    """Return how many classes are ahead of each row's target. nan is ahead of all numbers."""
    local = input.to_local() if isinstance(input, ShardedTensor) else input
    x, group = as_rows(local), sharding.group
    columns = target.reshape(x.shape[0], 1, x.shape[2])
    own, places = own_targets(columns, sharding)
    mine = torch.zeros_like(columns, dtype=x.dtype)
    if x.shape[1]:
        mine = torch.where(own, x.gather(1, places), 0)
    logit = collectives.all_reduce(mine, group)
    first = sharding.ranges.offset(group.rank)
    classes = torch.arange(first, first + x.shape[1], device=x.device).view(1, -1, 1)
    ahead = torch.zeros_like(columns)
    for index in blocks(x) if x.shape[1] else ():
        block, rival = x[index], logit[index]
        is_same = (block == rival) | (block.isnan() & rival.isnan())
        is_higher = (block > rival) | (block.isnan() & ~rival.isnan())
        before = is_same & (classes < columns[index])
        ahead[index] = (is_higher | before).sum(1, keepdim=True)
    return collectives.all_reduce(ahead, group).reshape(target.shape)
