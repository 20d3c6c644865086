"""Twenty dense modules of the kinds that projects have, for the tests of `--from`."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
ACT = nn.ReLU()


class ResidualMLPHead(nn.Module):
    """Two residual steps and a classifier."""

    def __init__(
        self, dim: int, num_classes: int, hidden: int = 18, dropout: float = 0.1
    ):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop = nn.Dropout(dropout)
        self.fc2 = nn.Linear(hidden, dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # Twice through the same block.
        for _ in range(2):
            x = x + self.drop(self.fc2(self.act(self.fc1(self.norm(x)))))
        return self.head(x)


class CosineClassifier(nn.Module):
    """Logits are scaled cosines."""

    def __init__(self, in_features: int, num_classes: int, scale: float = 16.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, in_features))
        self.scale = scale
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1))
        return self.scale * cosine


class LoRALinear(nn.Module):
    """A frozen linear layer and a trained low-rank update."""

    def __init__(
        self, in_features: int, out_features: int, rank: int = 3, alpha: float = 6.0
    ):
        super().__init__()
        self.base = nn.Linear(in_features, out_features)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, in_features) / rank)
        self.lora_b = nn.Parameter(torch.randn(out_features, rank) * 0.1)
        self.scaling = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        update = (x @ self.lora_a.T) @ self.lora_b.T
        return self.base(x) + self.scaling * update


class SqueezeExcite(nn.Module):
    """Channels are weighed by what the whole image says."""

    def __init__(self, channels: int, reduction: int = 2):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(channels, channels // reduction)
        self.fc2 = nn.Linear(channels // reduction, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels = x.shape[:2]
        weights = self.pool(x).view(batch, channels)
        weights = torch.sigmoid(self.fc2(F.relu(self.fc1(weights))))
        return x * weights.view(batch, channels, 1, 1)


class SwiGLU(nn.Module):
    """The gated unit of language models."""

    def __init__(self, dim: int, hidden: int, bias: bool = False):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=bias)
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class RelativePositionBias(nn.Module):
    """A learned bias for each head and each offset inside a window."""

    def __init__(self, window: int, num_heads: int):
        super().__init__()
        self.window = window
        self.num_heads = num_heads
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, num_heads))
        places = torch.stack(
            torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        ).flatten(1)
        offsets = places[:, :, None] - places[:, None, :] + window - 1
        self.register_buffer("index", offsets[0] * (2 * window - 1) + offsets[1])

    def forward(self, scores: Tensor) -> Tensor:
        size = self.window**2
        bias = self.table[self.index.view(-1)].view(size, size, self.num_heads)
        return scores + bias.permute(2, 0, 1).unsqueeze(0)


class VectorQuantizer(nn.Module):
    """The nearest code, with a straight-through gradient."""

    def __init__(self, num_codes: int, dim: int):
        super().__init__()
        self.codebook = nn.Parameter(torch.randn(num_codes, dim))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        distances = (
            x.pow(2).sum(-1, keepdim=True)
            - 2 * x @ self.codebook.t()
            + self.codebook.pow(2).sum(-1)
        )
        ids = distances.argmin(-1)
        quantized = F.embedding(ids, self.codebook)
        loss = F.mse_loss(quantized, x.detach())
        return x + (quantized - x).detach(), loss


class MixtureHead(nn.Module):
    """The parameters of a mixture of Gaussians."""

    def __init__(self, in_features: int, num_components: int):
        super().__init__()
        self.logits = nn.Linear(in_features, num_components)
        self.means = nn.Linear(in_features, num_components)
        self.log_scales = nn.Linear(in_features, num_components)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.softmax(self.logits(x), dim=-1)
        return weights, self.means(x), self.log_scales(x).clamp(-7, 7).exp()


class RMSNorm(nn.Module):
    """Root mean square norm with a gain."""

    def __init__(self, dim: int, eps: float = EPS):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x.float()).type_as(x) * self.gain


class LayerScale(nn.Module):
    """A learned factor for each feature."""

    def __init__(self, dim: int, init_value: float = 1e-2, inplace: bool = False):
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(init_value * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class PrototypeHead(nn.Module):
    """Logits are negative distances to class prototypes."""

    def __init__(self, dim: int, num_classes: int):
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(num_classes, dim))
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(x, self.prototypes) * self.log_temperature.exp()


class BilinearHead(nn.Module):
    """Scores of pairs."""

    def __init__(self, left: int, right: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, left, right))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("...i,oij,...j->...o", a, self.weight, b) + self.bias


class FactorisedEmbedding(nn.Module):
    """A narrow table and a projection."""

    def __init__(self, vocab_size: int, rank: int, dim: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, rank)
        self.project = nn.Linear(rank, dim, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.project(self.table(ids)) * math.sqrt(self.project.out_features)


class PositionalEmbedding(nn.Module):
    """Learned positions, added."""

    def __init__(self, max_length: int, dim: int, dropout: float = 0.1):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(1, max_length, dim))
        nn.init.trunc_normal_(self.position, std=0.02)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + self.position[:, : x.size(1)])


class FiLM(nn.Module):
    """Features are scaled and shifted by a condition."""

    def __init__(self, condition_dim: int, dim: int):
        super().__init__()
        self.project = nn.Linear(condition_dim, 2 * dim)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        gamma, beta = self.project(condition).chunk(2, dim=-1)
        return (1 + gamma) * x + beta


class BottleneckAdapter(nn.Module):
    """A low-rank detour around nothing."""

    def __init__(self, dim: int, bottleneck: int = 6, act: nn.Module = ACT):
        super().__init__()
        self.block = nn.Sequential(
            nn.Linear(dim, bottleneck), act, nn.Linear(bottleneck, dim)
        )
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.block(x)


class NetVLAD(nn.Module):
    """Residuals to soft-assigned centres, normalised."""

    def __init__(self, num_clusters: int, dim: int):
        super().__init__()
        self.assign = nn.Linear(dim, num_clusters)
        self.centres = nn.Parameter(torch.rand(num_clusters, dim))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.assign(x).softmax(-1)  # (N, L, K)
        residuals = x.unsqueeze(2) - self.centres  # (N, L, K, D)
        pooled = (weights.unsqueeze(-1) * residuals).sum(1)
        pooled = F.normalize(pooled, p=2, dim=2)
        return F.normalize(pooled.flatten(1), p=2, dim=1)


class MultiBranchHead(nn.Module):
    """Several linear heads on the same features."""

    def __init__(self, in_features: int, sizes: tuple[int, ...] = (5, 9)):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(in_features, size) for size in sizes)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(head(x) for head in self.heads)


class DepthwiseBlock(nn.Module):
    """A depthwise convolution, a norm, and two pointwise ones."""

    def __init__(self, channels: int, expansion: int = 3):
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.BatchNorm2d(channels)
        self.expand = nn.Conv2d(channels, channels * expansion, 1)
        self.project = nn.Conv2d(channels * expansion, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x))
        return x + self.project(F.relu6(self.expand(y)))


class TemperatureClassifier(nn.Linear):
    """A linear classifier with a learned temperature."""

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__(in_features, num_classes)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) / self.temperature
