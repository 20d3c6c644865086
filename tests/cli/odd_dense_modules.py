"""Dense modules with something in the way of reading them, for the tests of `--from`."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Buffers(nn.Module):
    """A running mean, a mask that is not saved, a bias that is not there."""

    def __init__(self, num_features: int, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_features, dim))
        self.register_parameter("bias", None)
        self.register_buffer("mean", torch.zeros(dim))
        mask = torch.arange(num_features) != 1
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().flatten(0, -2).mean(0))
        y = F.linear(x - self.mean, self.weight, self.bias)
        return y.masked_fill(~self.mask, 0.0)


class Tied(nn.Module):
    """One weight for the embedding and the output."""

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.embedding(ids))


class ReadFromOutside(nn.Module):
    """A weight of a layer is read beside the layer."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        penalty = self.fc.weight.norm() + self.scale.pow(2).sum()
        return self.fc(x) * self.scale, penalty


class FromFactories(nn.Module):
    """Any number of sizes, and no bias on demand."""

    def __init__(self, *sizes: int, bias: bool = True):
        super().__init__()
        pairs = pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=bias) for pair in pairs)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class ObjectDefaults(nn.Module):
    """Classes and partial functions as defaults."""

    def __init__(
        self,
        dim: int,
        act_layer: type[nn.Module] = nn.GELU,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),  # noqa: B008  # as projects do
    ):
        super().__init__()
        self.norm = norm_layer(dim)
        self.block = nn.Sequential(nn.Linear(dim, 9), act_layer(), nn.Linear(9, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.block(self.norm(x))
        return x if mask is None else x * mask


class Properties(nn.Module):
    """A class attribute, a property, a static method, a body on the line of its `def`."""

    eps = 1e-5

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.log_scale = nn.Parameter(torch.zeros(1))

    @property
    def scale(self) -> Tensor:
        return self.log_scale.exp() + self.eps

    @staticmethod
    def act(x: Tensor) -> Tensor: return F.gelu(x)  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight / self.weight.norm(dim=1, keepdim=True)
        return self.act(x @ weight.t()) * self.scale


class Sequence(nn.Sequential):
    """A sequence with a constructor of its own."""

    def __init__(self, in_features: int, out_features: int):
        parts = nn.Linear(in_features, out_features), nn.ReLU()
        super().__init__(*parts, nn.Linear(out_features, in_features))


class Attention(nn.Module):
    """Attention by hand."""

    def __init__(self, dim: int, num_heads: int = 4):
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        N, L, D = x.shape
        q = self.q(x).view(N, L, self.num_heads, -1).transpose(1, 2)
        kv = self.kv(x).view(N, L, 2, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ kv[0].transpose(-2, -1)) * (D // self.num_heads) ** -0.5
        y = (scores.softmax(-1) @ kv[1]).transpose(1, 2).reshape(N, L, D)
        return self.project(y)


class Branches(nn.Module):
    """What it computes depends on the values."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.a = nn.Linear(in_features, out_features)
        self.b = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if y.sum() > 0:
            return y
        return self.b(x) - y


class Convolution(nn.Module):
    """A weight of its own for F.conv1d."""

    def __init__(self, channels: int, out_channels: int, mode: str = "relu"):
        super().__init__()
        self.mode = mode
        self.weight = nn.Parameter(torch.randn(out_channels, channels, 3))
        self.mix = nn.Conv1d(out_channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        act = {"relu": F.relu}[self.mode]
        return self.mix(act(F.conv1d(x, self.weight, padding=1)))


class GroupedConvolution(nn.Module):
    """An argument says what F.conv2d does with the channels."""

    def __init__(self, in_channels: int, out_channels: int, groups: int = 1):
        super().__init__()
        shape = out_channels, in_channels // groups, 3, 3
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(out_channels))
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, 1, 1, 1, self.groups)


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(-1, keepdim=True)


class Opaque(nn.Module):
    """A function that sees the memory of its tensors and not what they are."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return _Centred.apply(self.fc(x)).pow(2).mean(-1)


class Transformed(nn.Module):
    """A transform, inside which tensors are not what they were."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        spread = torch.vmap(lambda row: row - row.mean(-1, keepdim=True))
        return spread(F.linear(x, self.weight)).abs().mean(-1)


class Checkpointed(nn.Module):
    """Backward runs a part of the forward again."""

    def __init__(self, dim: int, hidden: int, use_reentrant: bool = True):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.up = nn.Parameter(torch.randn(hidden, dim))
        self.down = nn.Parameter(torch.randn(dim, hidden))

    def block(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.up)), self.down).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return y


class OptionalParts(nn.Module):
    """Parts that are attributes where they are left out."""

    def __init__(self, dim: int, hidden: int, is_full: bool = True):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim) if is_full else None
        self.scale: nn.Parameter | None = None
        if is_full:
            self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.up(x))
        if self.down is None or self.scale is None:
            return y
        y = self.down(y)
        return y * self.scale


class CallsSuper(nn.Linear):
    """Its forward is partly its base's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Fixed(nn.Module):
    """Dropout that nothing turns off."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(x))


class Named(nn.Module):
    """A dict of outputs."""

    def __init__(self, in_features: int, num_classes: int):
        super().__init__()
        self.fc = nn.Linear(in_features, num_classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.fc(x)}


class Hooked(nn.Linear):
    """What it returns is changed by a hook."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features)
        self.register_forward_hook(lambda module, args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Parametrized(nn.Module):
    """Its weight is computed from others."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        nn.utils.parametrizations.weight_norm(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Finishing(nn.Module):
    """A method that has the name of one of the sharded layer's."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)

    def finish(self, x: Tensor) -> Tensor:
        return x * 3

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.fc(x))


class Grouped(nn.Module):
    """An attribute that has the name of one of the sharded layer's."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.group = 2.0
        self.fc = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.group


class KeepsMode(nn.Module):
    """A mode of its own."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.fc = nn.Linear(in_features, out_features)

    def train(self, mode: bool = True) -> KeepsMode:
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Not torch's function of the name: it normalises over the outputs."""
    return F.normalize(F.linear(x, weight), dim=-1)


class SameName(nn.Module):
    """It calls a function that has the name of one of torch's."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Plain(nn.Linear):
    """nn.Linear by another name."""


class NoParameters(nn.Module):
    """Nothing to divide."""

    def forward(self, x: Tensor) -> Tensor:
        return x**2


class Lazy(nn.Module):
    """Its shapes are not known."""

    def __init__(self, out_features: int):
        super().__init__()
        self.fc = nn.LazyLinear(out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class TakesGroup(nn.Module):
    """An argument that the sharded layer has too."""

    def __init__(self, in_features: int, group: int):
        super().__init__()
        self.fc = nn.Linear(in_features, group)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class NoForward(nn.Module):
    """A container."""


class NotAModule:
    """A class of another kind."""
