"""Groups, raw collectives and the differentiable moves between ranks.

`copy`, `reduce`, `scatter`, `gather` and their kin are the differentiable ones, of
`torchshard.distributed.ops`; `torchshard.distributed.collectives` holds the raw ones.
"""

from torchshard.distributed.groups import (
    GroupLike,
    ShardGroup,
    destroy_process_group,
    get_data_parallel_group,
    get_group,
    get_group_size,
    get_mesh,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    is_main_process,
    model_group,
    resolve_group,
)
from torchshard.distributed.ops import (
    all_gather,
    all_to_all,
    copy,
    enter_model_parallel,
    gather,
    leave_model_parallel,
    reduce,
    reduce_,
    reduce_scatter,
    scatter,
    total,
)
from torchshard.distributed.random import shard_rng

__all__ = [
    "GroupLike",
    "ShardGroup",
    "all_gather",
    "all_to_all",
    "copy",
    "destroy_process_group",
    "enter_model_parallel",
    "gather",
    "get_data_parallel_group",
    "get_group",
    "get_group_size",
    "get_mesh",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "is_main_process",
    "leave_model_parallel",
    "model_group",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "resolve_group",
    "scatter",
    "shard_rng",
    "total",
]
