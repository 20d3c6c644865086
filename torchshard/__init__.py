"""torchshard: torch.nn layers sliced over ranks, and the tools to make new ones."""

from torchshard import amp, distributed, errors, loss, nn, optim, utils
from torchshard.checkpoint import sharded_state_dict
from torchshard.checks import expect_indices
from torchshard.compatibility import (
    _ORDER_ATTR as _ORDER_ATTR,
)
from torchshard.compatibility import (
    _PARALLEL_DIM as _PARALLEL_DIM,
)
from torchshard.compatibility import (
    get_parallel_dim,
    register_parallel_attribute,
    register_parallel_dim,
    set_attribute,
    slice,
)
from torchshard.conversion_plan import Column, Row, plan_conversion
from torchshard.convert import convert_layers, parallelize, to_dense
from torchshard.data_parallel import register_ddp_parameters_to_ignore
from torchshard.distributed.groups import (
    ShardGroup,
    destroy_process_group,
    init_process_group,
)
from torchshard.initializer import (
    Constant,
    Given,
    Initializer,
    Normal,
    Uniform,
    ZeroRow,
    fan_in_uniform,
    kaiming_uniform,
    xavier_normal,
    xavier_uniform,
)
from torchshard.layer import (
    AttentionLayer,
    ClassLoss,
    FeatureLayer,
    MarginHead,
    MarkedLayer,
    ParallelLayer,
    ParameterSpec,
    TableLayer,
)
from torchshard.layout import (
    Axis,
    Layout,
    Partial,
    Segment,
    Shard,
    Whole,
    covering,
    ranges_of,
)
from torchshard.packing import Packing
from torchshard.splits import Split, split_of
from torchshard.state import collect_state_dict, relocate_state_dict
from torchshard.tensor import ShardedTensor

__version__ = "0.2.0"

__all__ = [
    "AttentionLayer",
    "Axis",
    "ClassLoss",
    "Column",
    "Constant",
    "FeatureLayer",
    "Given",
    "Initializer",
    "Layout",
    "MarginHead",
    "MarkedLayer",
    "Normal",
    "Packing",
    "ParallelLayer",
    "ParameterSpec",
    "Partial",
    "Row",
    "Segment",
    "Shard",
    "ShardGroup",
    "ShardedTensor",
    "Split",
    "TableLayer",
    "Uniform",
    "Whole",
    "ZeroRow",
    "__version__",
    "amp",
    "collect_state_dict",
    "convert_layers",
    "covering",
    "destroy_process_group",
    "distributed",
    "errors",
    "expect_indices",
    "fan_in_uniform",
    "get_parallel_dim",
    "init_process_group",
    "kaiming_uniform",
    "loss",
    "nn",
    "optim",
    "parallelize",
    "plan_conversion",
    "ranges_of",
    "register_ddp_parameters_to_ignore",
    "register_parallel_attribute",
    "register_parallel_dim",
    "relocate_state_dict",
    "set_attribute",
    "sharded_state_dict",
    "slice",
    "split_of",
    "to_dense",
    "utils",
    "xavier_normal",
    "xavier_uniform",
]
