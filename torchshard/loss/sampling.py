"""Sampled classes: a softmax over the targets' classes and a random part of the others.

As in Partial FC (arXiv:2203.15565): every rank keeps those of its classes that are some
row's target, and draws others of its own until it has its share. The loss is the exact loss
of the classes that take part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchshard.distributed.random import shard_rng
from torchshard.loss.criterion import own_targets
from torchshard.tensor.sharded import Sharding


@dataclass(frozen=True)
class Sample:
    """The classes of this rank that take part.

    Attributes:
        rows: Their places among this rank's classes, ascending; None if all take part.
        own: Whether this rank has a row's target; None for probabilities.
        places: The target's place among those that take part.
    """

    rows: Tensor | None = None
    own: Tensor | None = None
    places: Tensor | None = None


def sampled(columns: Tensor | None, sharding: Sharding, sample_rate: float) -> Sample:
    """Draw this rank's classes for a batch, from its own random stream.

    Args:
        columns: Target classes; what is no class is ignored. None for probabilities, which
            every class takes part in.
        sharding: How the classes are spread.
        sample_rate: Share of a rank's classes that take part. If more are targets, all
            of those do.
    """
    if columns is None:
        return Sample()
    own, places = own_targets(columns, sharding)
    if sample_rate == 1:
        return Sample(None, own, places)
    num = int(sample_rate * sharding.length)
    positive = torch.unique(places[own])
    with shard_rng(sharding.group, columns.device):
        lot = torch.rand(sharding.length, device=columns.device)
    lot[positive] = 2.0  # above all that is drawn
    rows = lot.topk(max(num, len(positive))).indices.sort().values
    return Sample(rows, own, torch.searchsorted(rows, places))
