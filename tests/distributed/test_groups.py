"""Groups: M data-parallel x N model-parallel ranks, adopted meshes, copies and errors."""

import copy
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torchshard as ts
from torch.distributed.device_mesh import init_device_mesh
from torchshard.distributed import groups, ops
from torchshard.errors import GroupError
from torchshard.testing.ranks import run_ranks


def arrangement():
    data = groups.get_data_parallel_group()
    return {
        "model": dist.get_process_group_ranks(groups.get_group()),
        "data": dist.get_process_group_ranks(data),
        "rank": groups.get_rank(),
        "sizes": (
            groups.get_world_size(),
            groups.get_group_size(),
            groups.get_mesh().shape,
        ),
        "sum": ops.reduce(torch.tensor([10.0 ** dist.get_rank()])).item(),
        "gathered": ops.gather(torch.tensor([dist.get_rank()]), 0).tolist(),
        "initialized": groups.is_initialized(),
    }


def test_two_by_two_ranks():
    """R3, T19: model groups are consecutive ranks, data groups hold one of each."""
    results = run_ranks(arrangement, 4, group_size=2)
    for world_rank, found in enumerate(results):
        first = world_rank // 2 * 2
        assert found == {
            "model": [first, first + 1],
            "data": [world_rank % 2, world_rank % 2 + 2],
            "rank": world_rank % 2,
            "sizes": (2, 2, (2, 2)),
            "sum": 10.0**first + 10.0 ** (first + 1),
            "gathered": [first, first + 1],
            "initialized": True,
        }


@pytest.mark.parametrize(("world_size", "group_size"), [(3, -1), (3, 1), (3, 3)])
def test_sizes_of_the_model_group(world_size, group_size):
    """-1 is the whole world; 1 is data parallelism alone."""
    size = world_size if group_size == -1 else group_size
    for found in run_ranks(arrangement, world_size, group_size=group_size):
        assert found["sizes"] == (size, size, (world_size // size, size))


def adopt():
    ts.init_process_group(
        mesh=init_device_mesh(
            "cpu", (2, 1, 2), mesh_dim_names=("data", "pipe", "model")
        )
    )
    three = (groups.get_rank(), dist.get_process_group_ranks(groups.get_group()))
    ts.init_process_group(mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("model",)))
    alone = groups.get_data_parallel_group()
    sizes = groups.get_world_size()
    messages = []
    for call in (
        lambda: ts.init_process_group(
            mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        ),
        lambda: ts.init_process_group(3),
        lambda: ts.init_process_group(0),
        lambda: groups.resolve_group(init_device_mesh("cpu", (4,))),
        lambda: groups.resolve_group(dist.GroupMember.NON_GROUP_MEMBER),
    ):
        with pytest.raises(GroupError) as error:
            call()
        messages.append(str(error.value))
    assert groups.get_world_size() == 4
    return three, alone, sizes, messages


def test_a_mesh_of_the_callers_own_is_adopted():
    """A mesh with a "model" dim gives the groups; errors leave the groups as they were."""
    results = run_ranks(adopt, 4)
    assert [result[0] for result in results] == [
        (0, [0, 1]),
        (1, [0, 1]),
        (0, [2, 3]),
        (1, [2, 3]),
    ]
    _, alone, size, messages = results[0]
    assert alone is None
    assert size == 4
    member = (
        " Expected a ShardGroup, a torch.distributed group with this rank among its members"
        " (mesh.get_group(dim) of a DeviceMesh), or None."
    )
    assert messages[:3] == [
        "mesh has the dims ['tp'], none of them named 'model'. Expected"
        " mesh_dim_names=('data', 'model') or ('model',).",
        "group_size=3 does not divide the world of 4 ranks. Expected a divisor, or -1 for"
        " the whole world.",
        "group_size=0 does not divide the world of 4 ranks. Expected a divisor, or -1 for"
        " the whole world.",
    ]
    for message in messages[3:]:
        assert re.fullmatch(
            r"group=.* is not a process group that this rank is in\."
            + re.escape(member),
            message,
        )


def destroy_and_begin_again():
    rank = dist.get_rank()
    path = "file://" + FOLDER_OF[0]
    ts.destroy_process_group()
    assert not groups.is_initialized()
    assert groups.get_mesh() is None
    assert groups.get_group() is None
    assert (groups.get_rank(), groups.get_world_size()) == (0, 1)
    x = torch.ones(2)
    assert ops.reduce(x) is x
    dist.init_process_group("gloo", init_method=path, rank=rank, world_size=2)
    ts.init_process_group()
    return ops.reduce(x).tolist(), groups.get_world_size()


FOLDER_OF = [""]


def begin_again_at(path):
    FOLDER_OF[0] = path
    return destroy_and_begin_again()


def test_groups_are_destroyed_and_begun_again(tmp_path):
    """In between every layer is a group of one."""
    results = run_ranks(begin_again_at, 2, str(tmp_path / "again"))
    assert results == [([2.0, 2.0], 2)] * 2


def test_nothing_initialised_is_a_group_of_one():
    """T72: in a notebook every question has an answer, and only several ranks are refused."""
    assert ts.init_process_group() is None
    assert (groups.get_rank(), groups.get_world_size(), groups.get_group_size()) == (
        0,
        1,
        1,
    )
    assert groups.get_group() is None
    assert groups.get_data_parallel_group() is None
    assert groups.resolve_group(None) is groups.model_group()
    assert repr(groups.model_group()) == "ShardGroup(size=1, rank=0)"
    with pytest.raises(GroupError) as error:
        ts.init_process_group(4)
    assert str(error.value) == (
        "group_size=4 needs 4 processes, but this one was not started by a launcher. Run"
        " it with: torchrun --nproc-per-node 4 SCRIPT"
    )
    alone = pickle.loads(pickle.dumps(groups.ShardGroup()))
    assert alone == groups.ShardGroup()


def copies():
    group = groups.model_group()
    assert copy.deepcopy({"group": group})["group"] is group
    assert copy.copy(group) is group
    assert pickle.loads(pickle.dumps(group)) is group
    again = groups.ShardGroup(groups.get_group())
    assert again == group
    assert hash(again) == hash(group)
    assert again != groups.ShardGroup()
    assert group != "group"
    data = groups.resolve_group(groups.get_data_parallel_group())
    assert copy.copy(data) is data
    assert data != group
    pickled = pickle.dumps(group)
    ts.init_process_group(mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("model",)))
    with pytest.raises(GroupError) as error:
        pickle.loads(pickled)
    return str(error.value)


def test_groups_are_copied_and_pickled_by_their_place():
    """T55: copies share the group; loaded elsewhere than on the same rank it is refused."""
    assert run_ranks(copies, 4, group_size=2)[3] == (
        "The layer was pickled as rank 1 of 2, but this process is rank 3 of 4 in its model"
        " group. Load it on the same rank of a group of the same size, or load a collected"
        " state dict instead."
    )


def main_process():
    return ts.distributed.is_main_process()


def test_one_main_process_in_the_world():
    """Rank 0 of the world is the main process, whatever the groups; alone, one is it."""
    assert run_ranks(main_process, 4, group_size=2) == [True, False, False, False]
    assert main_process()
