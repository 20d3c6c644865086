"""Mirror of torch.utils.data: the sampler for groups of ranks that share one model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler
from torchshard.distributed.groups import get_data_parallel_group, get_world_size


class DistributedGroupSampler(DistributedSampler[Any]):
    """Sample so that the ranks of one model group see the same data, and groups other data.

    With M data-parallel groups of N model-parallel ranks it is
    `torch.utils.data.DistributedSampler` over the M groups: `set_epoch`, `shuffle`, `seed` and
    `drop_last` mean what they mean there.

    Args:
        dataset: The data set; its length is all that is asked of it.
        num_groups: Number of data-parallel groups, M; by default those of
            `torchshard.distributed.init_process_group`, 1 where nothing is initialised.
        group_index: Which of them this rank belongs to.
        shuffle: Whether to shuffle, anew in each epoch.
        seed: Seed of the shuffle, the same on all ranks.
        drop_last: Whether to drop the tail that does not divide, rather than to repeat samples.

    Raises:
        ValueError: If `group_index` is not one of the groups.

    Example:
        >>> sampler = DistributedGroupSampler(range(6), num_groups=2, group_index=1, shuffle=False)
        >>> list(sampler)
        [1, 3, 5]
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_groups: int | None = None,
        group_index: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        own = _data_parallel_place()
        super().__init__(
            dataset,
            num_replicas=own[0] if num_groups is None else num_groups,
            rank=own[1] if group_index is None else group_index,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )


def _data_parallel_place() -> tuple[int, int]:
    """Return the number of model groups and which of them this rank is in."""
    group = get_data_parallel_group()
    if group is not None:
        return group.size(), group.rank()
    if get_world_size() == 1 and dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0
