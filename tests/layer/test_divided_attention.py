"""A model's own attention, of plain Linears, divided by a plan alone: it trains as the dense one."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torchshard.testing import run_ranks


class Packed(nn.Module):
    """What a user wrote: q, k and v from one Linear, heads apart by a view."""

    def __init__(self, size, num_heads, head_size):
        super().__init__()
        self.num_heads, self.head_size = num_heads, head_size
        self.qkv = nn.Linear(size, 3 * num_heads * head_size)
        self.out = nn.Linear(num_heads * head_size, size)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.num_heads, self.head_size)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Chunked(Packed):
    def forward(self, x):
        batch, length, _ = x.shape

        def heads(part):
            return part.view(batch, length, self.num_heads, -1).transpose(1, 2)

        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        weights = (q @ k.transpose(-2, -1) / self.head_size**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.attn = attention
        self.gate_up = nn.Linear(10, 14)
        self.down = nn.Linear(7, 10)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def plan_for(head_size):
    return {
        "attn.qkv": ts.Column(blocks=3, unit=head_size),
        "attn.out": ts.Row(unit=head_size),
        "gate_up": ts.Column(blocks=2),
        "down": "row",
    }


def trained(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 5, 10, dtype=torch.float64, generator=generator)
        loss = (model(x) - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trains_like_the_dense_one(attention, num_heads, head_size):
    torch.manual_seed(3)
    dense = Block(attention(10, num_heads, head_size)).double()
    model = ts.parallelize(copy.deepcopy(dense), plan_for(head_size))
    losses, expected = trained(model), trained(dense)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-12)
    whole = ts.collect_state_dict(model)
    for key, value in dense.state_dict().items():
        torch.testing.assert_close(whole[key], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("attention", [Packed, Chunked])
def test_a_plan_with_heads_trains_like_the_dense_model(attention, world_size):
    """6 heads, on 4 ranks too, and packed gate and up: losses and weights after AdamW's steps."""
    run_ranks(trains_like_the_dense_one, world_size, attention, 6, 2)


@pytest.mark.parametrize("world_size", [3, 4])
def test_fewer_heads_than_ranks_train_too(world_size):
    """2 heads on 3 and 4 ranks: some hold none."""
    run_ranks(trains_like_the_dense_one, world_size, Packed, 2, 3)
