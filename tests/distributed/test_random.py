"""Random streams: shards draw differently, replicated tensors alike."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torchshard.distributed import groups
from torchshard.distributed.random import shard_rng
from torchshard.testing.ranks import run_ranks

CPU = torch.device("cpu")


def streams():
    group = groups.model_group()
    torch.manual_seed(3)
    common = torch.rand(4)
    with shard_rng(group, CPU):
        first = torch.rand(4)
    between = torch.rand(4)
    with shard_rng(group, CPU):
        second = torch.rand(4)
    after = torch.rand(4)
    torch.manual_seed(3)
    torch.rand(4)
    with shard_rng(group, CPU):
        again = torch.rand(4)
    same = torch.equal(first, again)
    return torch.stack([common, between, after]), torch.stack([first, second]), same


def test_shards_draw_from_streams_of_their_own():
    """T42: inside the block every rank and every block differ; outside all ranks agree."""
    results = run_ranks(streams, 4)
    assert all(torch.equal(common, results[0][0]) for common, _, _ in results)
    assert all(same for _, _, same in results)
    own = torch.cat([own for _, own, _ in results])
    assert len({tuple(row) for row in own.tolist()}) == 8
    assert len({tuple(row) for row in results[0][0].tolist()}) == 3


def rematerialised():
    group = groups.model_group()

    def masked(x):
        x = F.dropout(x, 0.5)
        with shard_rng(group, CPU):
            return F.dropout(x * 2, 0.5)

    results = []
    for use_checkpoint in (False, True):
        torch.manual_seed(group.rank - group.rank + 5)
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(masked, x, use_reentrant=False) if use_checkpoint else masked(x)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        results += [y.detach(), torch.rand(2)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    return results[0]


def test_checkpointing_replays_the_masks():
    """The recomputed forward draws the masks of the first one, and the stream ends alike."""
    first, second = run_ranks(rematerialised, 2)
    assert not torch.equal(first, second)


def test_a_group_of_one_draws_from_the_default_stream():
    """As torch.nn would."""
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with shard_rng(groups.model_group(), CPU):
        assert torch.equal(torch.rand(3), expected)


def raising():
    group = groups.model_group()
    torch.manual_seed(2)
    try:
        with shard_rng(group, CPU):
            torch.rand(group.rank + 1)
            raise KeyError("inside")
    except KeyError:
        return torch.rand(3).tolist()


def test_the_callers_stream_is_restored_after_an_error():
    """T13: an exception inside the block leaves all ranks in step."""
    first, second = run_ranks(raising, 2)
    assert first == second
