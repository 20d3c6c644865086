"""Shards in torch.distributed.checkpoint: any number of ranks to any other, in place."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torchshard as ts
from torch import nn
from torchshard.checkpoint import sharded_state_dict
from torchshard.state import collect_state_dict
from torchshard.testing import run_ranks

from layer_zoo import (
    ParallelConv1d,
    ParallelEmbedding,
    ParallelLinear,
    ParallelMultiheadAttention,
)

WORLDS = [1, 2, 3, 4]


class Odd(ts.ParallelLayer):
    """Parameters in every layout: packed in the middle dim, overlapping, both, whole."""

    def __init__(self, heads=6, *, group=None):
        super().__init__(group)
        head = ts.Axis(heads)
        query, key = ts.Segment("head", 2), ts.Segment("key", 2)
        shapes = {
            "key": ((4, 3), ts.Shard(0, key)),
            "middle": ((3, 12, 2), ts.Shard(1, [ts.Segment("head")] * 2)),
            "packed": ((18,), ts.Shard(-1, [ts.Segment("head")] * 3)),
            "mixed": ((20, 3), ts.Shard(0, [query, key, key])),
            "scale": ((4,), ts.Whole()),
        }
        self.declare(
            axes={"head": head, "key": ts.covering(head, 3)},
            parameters={
                name: ts.ParameterSpec(shape, layout, ts.Normal())
                for name, (shape, layout) in shapes.items()
            },
            buffers={"mean": ts.ParameterSpec((6,), ts.Shard(0, "head"), ts.Normal())},
            inputs={"input": ts.Whole()},
            output=ts.Whole(),
        )

    def local_forward(self, input):
        return input


def model():
    """Uneven, with fewer rows than ranks in places, in several dtypes."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "odd": Odd(),
            "column": ParallelLinear(3, 7, dim=1),
            "thin": ParallelLinear(3, 2, dim=1),
            "row": ParallelLinear(2, 5, dim=0, dtype=torch.float64),
            "embedding": ParallelEmbedding(2, 3, dim=0, dtype=torch.bfloat16),
            "attention": ParallelMultiheadAttention(8, 4, add_bias_kv=True),
            "conv": ParallelConv1d(4, 5, 3, dim=0),
            "norm": nn.BatchNorm1d(3),
        }
    )


def dense_parts():
    """The part of the model that has a twin in torch.nn, with the same state keys."""
    return nn.ModuleDict(
        {
            "column": nn.Linear(3, 7),
            "thin": nn.Linear(3, 2),
            "row": nn.Linear(2, 5, dtype=torch.float64),
            "embedding": nn.Embedding(2, 3, dtype=torch.bfloat16),
            "attention": nn.MultiheadAttention(8, 4, add_bias_kv=True),
            "conv": nn.Conv1d(4, 5, 3),
            "norm": nn.BatchNorm1d(3),
        }
    )


def emptied(module):
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.zero_()
    return module


def same_state(actual, expected):
    assert list(actual) == list(expected)
    for key, value in actual.items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key


def save(folder):
    module = model()
    dcp.save(sharded_state_dict(module), checkpoint_id=folder)
    return collect_state_dict(module)


def load(folders, expected):
    for folder in folders:
        module = emptied(model())
        places = [tensor.data_ptr() for tensor in module.state_dict().values()]
        state = sharded_state_dict(module)
        dcp.load(state, checkpoint_id=folder)
        assert places == [t.data_ptr() for t in module.state_dict().values()]
        same_state(collect_state_dict(module), expected)
        again = emptied(model())
        again.load_state_dict(state)
        same_state(collect_state_dict(again), expected)


def test_any_number_of_ranks_to_any_other(tmp_path):
    """T45, T47, T49: saved on N ranks and loaded on M in place, nothing changes, N, M 1 to 4."""
    folders = [str(tmp_path / str(world_size)) for world_size in WORLDS]
    saved = [
        run_ranks(save, world_size, folder)[0]
        for world_size, folder in zip(WORLDS, folders, strict=True)
    ]
    for state in saved[1:]:
        same_state(state, saved[0])
    for world_size in WORLDS:
        run_ranks(load, world_size, folders, saved[0])


def parts(module):
    return nn.ModuleDict({k: v for k, v in module.items() if k != "odd"})


def to_and_from_dense(dense_folder, sharded_folder, expected):
    module = parts(emptied(model()))
    dcp.load(sharded_state_dict(module), checkpoint_id=dense_folder)
    same_state(collect_state_dict(module), expected)
    dcp.save(sharded_state_dict(module), checkpoint_id=sharded_folder)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dense_checkpoints_load_into_shards_and_back(tmp_path):
    """A dense model's checkpoint loads into a sharded model, and the other way round."""
    dense = dense_parts()
    expected = {key: value.clone() for key, value in dense.state_dict().items()}
    folders = [str(tmp_path / name) for name in ("dense", "sharded")]
    dcp.save(dense.state_dict(), checkpoint_id=folders[0])
    run_ranks(to_and_from_dense, 3, *folders, expected)
    state = emptied(dense).state_dict()
    dcp.load(state, checkpoint_id=folders[1])
    same_state(state, expected)


def replicated(folder):
    module = model()
    expected = collect_state_dict(module)
    dcp.save(sharded_state_dict(module), checkpoint_id=folder)
    emptied(module)
    dcp.load(sharded_state_dict(module), checkpoint_id=folder)
    same_state(collect_state_dict(module), expected)


def test_two_replicas_of_two_shards(tmp_path):
    """In a 2 x 2 mesh the replicas write each chunk once and all read it."""
    run_ranks(replicated, 4, str(tmp_path), group_size=2)
