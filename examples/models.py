"""Three models of plain torch.nn to divide: a ResNet, a GPT-2 and a ViT, of any size.

They know nothing of torchshard. Their modules bear the names that torchvision and GPT-2 have,
and `RESNET_PLAN`, `GPT_PLAN` and `VIT_PLAN` say for `torchshard.parallelize` how to divide
them:

    model = torchshard.parallelize(GPT(), GPT_PLAN)

The logits of the GPT stay divided, for `torchshard.nn.ParallelCrossEntropyLoss`; those of the
other two come whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A column-parallel layer whose output the next layer, a normalisation, needs whole.
GATHERED = {"dim": 1, "gather_output": True}

RESNET_PLAN: dict[str, Any] = {
    "layer*.conv1": GATHERED,
    "layer*.conv2": "row",
    "fc": GATHERED,
}
GPT_PLAN: dict[str, Any] = {
    "transformer.wte": "vocabulary",
    "*.q_proj": "column",
    "*.k_proj": "column",
    "*.v_proj": "column",
    "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
    "lm_head": "column",
}
PACKED_GPT_PLAN: dict[str, Any] = {
    "transformer.wte": "vocabulary",
    # Its rows are those of q, then k, then v: a cut of its output would not give each rank
    # whole heads. The weights are divided, the output comes whole.
    "*.c_attn": GATHERED,
    "*.c_proj": "row",
    "*.c_fc": "column",
    "lm_head": "column",
}
VIT_PLAN: dict[str, Any] = {
    "conv_proj": GATHERED,
    "*.self_attn": "heads",
    "*.linear1": "column",
    "*.linear2": "row",
    "heads.head": GATHERED,
}


class BasicBlock(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample: nn.Module | None = None
        if stride != 1 or in_planes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride, bias=False),
                nn.BatchNorm2d(planes),
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        skip = x if self.downsample is None else self.downsample(x)
        return self.relu(y + skip)


class ResNet(nn.Module):
    """ResNet of basic blocks: `ResNet((64, 128, 256, 512), (2, 2, 2, 2), 1000)` is ResNet-18."""

    def __init__(
        self,
        planes: tuple[int, ...] = (5, 6),
        blocks: tuple[int, ...] = (1, 1),
        num_classes: int = 7,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, planes[0], 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.num_stages = len(planes)
        in_planes = planes[0]
        for stage, (width, depth) in enumerate(zip(planes, blocks, strict=True)):
            layers = []
            for block in range(depth):
                stride = 2 if stage and not block else 1
                layers.append(BasicBlock(in_planes, width, stride))
                in_planes = width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(planes[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(self.num_stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class CausalSelfAttention(nn.Module):
    """Attention whose three projections are apart."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.q_proj = nn.Linear(n_embd, n_embd)
        self.k_proj = nn.Linear(n_embd, n_embd)
        self.v_proj = nn.Linear(n_embd, n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length, n_embd = q.shape
        heads = (batch, length, self.n_head, n_embd // self.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, n_embd)


class PackedSelfAttention(CausalSelfAttention):
    """Attention with GPT-2's own packed projection."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__(n_embd, n_head)
        del self.q_proj, self.k_proj, self.v_proj
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.attend(*self.c_attn(x).chunk(3, dim=-1)))


class MLP(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, packed: bool) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        attention = PackedSelfAttention if packed else CausalSelfAttention
        self.attn = attention(n_embd, n_head)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2, its head tied to its embedding: sizes 50257, 1024, 768, 12, 12 are the small one."""

    def __init__(
        self,
        vocab_size: int = 13,
        block_size: int = 6,
        n_embd: int = 12,
        n_head: int = 4,
        n_layer: int = 2,
        packed: bool = False,
    ) -> None:
        super().__init__()
        blocks = [Block(n_embd, n_head, packed) for _ in range(n_layer)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(n_embd),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits, (N, L, vocab_size), of ids (N, L)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.transformer["wte"](ids) + self.transformer["wpe"](positions)
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))


class ViT(nn.Module):
    """Vision transformer: 224, 16, 768, 12, 12, 3072, 1000 are the sizes of ViT-B/16."""

    def __init__(
        self,
        image_size: int = 8,
        patch_size: int = 4,
        hidden_dim: int = 10,
        num_heads: int = 5,
        num_layers: int = 2,
        mlp_dim: int = 11,
        num_classes: int = 7,
    ) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, hidden_dim, patch_size, patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden_dim))
        length = (image_size // patch_size) ** 2 + 1
        self.pos_embedding = nn.Parameter(torch.randn(1, length, hidden_dim) * 0.02)
        layer = nn.TransformerEncoderLayer(
            hidden_dim,
            num_heads,
            mlp_dim,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(hidden_dim), enable_nested_tensor=False
        )
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(hidden_dim, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        return self.heads(self.encoder(x + self.pos_embedding)[:, 0])
