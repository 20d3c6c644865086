"""Noise on shards in a compiled graph: of its own on every rank, and again under a seed."""

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from sharded_cases import close, randoms
from torch import nn
from torchshard.distributed import collectives, groups
from torchshard.testing import run_ranks

from layer_zoo import ParallelMultiheadAttention


def heads(seed):
    """Queries, keys and values (N, H, L, D) of four heads, divided by heads."""
    whole = [randoms((2, 4, 6, 5), seed + index).float() for index in range(3)]
    return whole, [
        ts.ShardedTensor.from_local(ts.distributed.scatter(x, 1), 1) for x in whole
    ]


CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()
ATTENTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean mask": {"attn_mask": CAUSAL},
    "float mask": {"attn_mask": torch.randn(6, 6)},
    "scaled": {"scale": 0.3},
}


def attended(p, options):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **options)

    return torch.compile(attend, fullgraph=True, backend="aot_eager")


def by_steps():
    for case, options in ATTENTIONS.items():
        torch._dynamo.reset()
        whole, shards = heads(1)
        want = F.scaled_dot_product_attention(*whole, **options)
        y = ts.distributed.gather(attended(1e-9, options)(*shards))
        close(y, want, case, 1e-5)


def test_attention_by_steps_is_attention():
    """Where next to nothing is dropped, it is torch's own, masked and scaled in every way."""
    run_ranks(by_steps, 2)


def dropped_alike():
    """Return how often two ranks drop the same of equal heads, and a run like the first."""
    ones = torch.ones(1, 2, 32, 32)
    equal = [ts.ShardedTensor.from_local(ones[:, :1], 1) for _ in range(3)]
    attend = attended(0.5, {})
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        value = torch.eye(32).expand(1, 1, 32, 32)  # so that the weights come out
        value = ts.ShardedTensor.from_local(value.contiguous(), 1)
        runs.append(attend(equal[0], equal[1], value).to_local() != 0)
    both = collectives.stack(runs[0].double(), groups.model_group())
    return (both[0] == both[1]).double().mean().item(), [
        torch.equal(runs[0], run) for run in runs
    ]


def layer_drops():
    torch.manual_seed(1)
    layer = ParallelMultiheadAttention(8, 4, dropout=0.5, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.zero_()  # all weights are equal until some are dropped
        layer.in_proj_weight.to_local()[-4:] = 1
        layer.out_proj.weight.fill_(1.0)
    x = torch.ones(1, 16, 8)
    own = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def run(seed):
        torch.manual_seed(seed)
        return own(x, x, x, need_weights=False)[0]

    whole = run(2)
    return torch.equal(whole, run(2)), torch.equal(whole, run(3))


def test_attention_drops_of_its_own_on_every_rank():
    """Ranks agree by chance alone; a seed brings the same again; another seed does not."""
    for agree, same in run_ranks(dropped_alike, 2):
        assert 0.4 < agree < 0.6
        assert same == [True, True, False]
    assert run_ranks(layer_drops, 2) == [(True, False)] * 2


NOISES = {
    "dropout": lambda x: F.dropout(x, 0.5) != 0,
    "module": lambda x: nn.Dropout(0.5)(x) != 0,
    "rand_like": lambda x: torch.rand_like(x) > 0.5,
    "randn_like": lambda x: torch.randn_like(x) > 0,
}


def noise(name):
    x = ts.ShardedTensor.from_local(torch.ones(16, 32), 1)
    draw = torch.compile(NOISES[name], fullgraph=True, backend="aot_eager")
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(draw(x).to_local())
    both = collectives.stack(runs[0].double(), groups.model_group())
    agree = (both[0] == both[1]).double().mean().item()
    return agree, [torch.equal(runs[0], run) for run in runs]


@pytest.mark.parametrize("name", NOISES)
def test_noise_is_of_the_rank(name):
    """As in eager mode, whatever draws it."""
    for agree, same in run_ranks(noise, 2, name):
        assert 0.4 < agree < 0.6
        assert same == [True, True, False]
