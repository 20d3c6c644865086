"""FeatureLayer: what every layer from features to features does alike when it is divided.

Linear layers, convolutions and transposed ones have a weight with a dim of output and a dim
of input features (a convolution's channels are its features) and a bias of the output's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchshard.distributed.groups import GroupLike
from torchshard.errors import LayoutError
from torchshard.initializer import Initializer
from torchshard.layer.base import ParallelLayer
from torchshard.layer.declaration import ParameterSpec
from torchshard.layout import Axis, Layout, Partial, Segment, Segments, Shard, Whole
from torchshard.packing import Packing
from torchshard.splits import FEATURES, Dim, Splits


class FeatureLayer(ParallelLayer):
    """Base of layers that compute `op(x, weight) + bias`, of features.

    Over R ranks, on rank r, with the features at one dim of x and y:

                    "column"                    "row"
        x           whole                       features / R, or whole
        weight_r    output features / R         input features / R
        bias        output features / R         whole, added once, after the sum
        y           output features / R         whole

        forward     no collective               all-reduce
        backward    all-reduce of dx            local

    With groups of features that see each other alone, "column" divides the groups, and x is
    sharded as well. A subclass sets its fields, calls `declare_features` at the end of its
    constructor, and computes with `own_weight`, `own_bias` and, if it has groups, `own_groups`.

    Args:
        group: The ranks; None is the model group.
        dim: 1, -1 or "column"; 0 or "row"; None for no split.
        packing: What of the divided features stays together.

    Example:
        >>> import torch, torchshard as ts
        >>> class ParallelCosine(ts.FeatureLayer):
        ...     def __init__(self, in_features, out_features, dim=None, *, group=None):
        ...         super().__init__(group, dim)
        ...         self.declare_features(
        ...             {"input": in_features},
        ...             out_features,
        ...             (out_features, in_features),
        ...             init=ts.kaiming_uniform(in_features),
        ...             bias_init=None,
        ...         )
        ...
        ...     def local_forward(self, input):
        ...         return torch.cos(input) @ self.own_weight.T
        >>> ParallelCosine(3, 5, dim=0)(torch.ones(2, 3)).shape
        torch.Size([2, 5])
    """

    splits: ClassVar[Splits] = FEATURES
    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, group: GroupLike = None, dim: Dim = None, packing: Packing | None = None
    ) -> None:
        super().__init__(group, dim)
        self._packing = packing or Packing()
        self._features_dim = -1
        self._weight_dims = (0, 1)
        self._num_groups = 1
        self._first_input = ""
        self._filled: tuple[int, int] | None = None
        if self.split == "row" and self._packing.serves != 1:
            raise LayoutError(
                f"serves={self._packing.serves} with dim={dim!r}: units that several ranks"
                " hold would be added several times. Only output features can serve others."
            )

    def declare_features(
        self,
        inputs: Mapping[str, int],
        out_features: int,
        weight_shape: tuple[int, ...],
        *,
        init: Initializer,
        bias_init: Initializer | None,
        weight_dims: tuple[int, int] = (0, 1),
        features_dim: int = -1,
        groups: int = 1,
        takes_none: bool = True,
        gather_output: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Declare weight and bias, as the split says. Called at the constructor's end.

        Args:
            inputs: For each tensor argument of `local_forward` its number of features; the
                first is the one that a row split divides.
            out_features: Number of features of the output.
            weight_shape: Shape of the whole weight.
            init: The weight's initialiser.
            bias_init: The bias', None for no bias.
            weight_dims: The weight's dims of output and of input features.
            features_dim: Where input and output have their features, counted from the back.
            groups: Number of groups of features that see each other alone.
            takes_none: Whether the operation computes with no features at all. Torch's
                convolutions do not: a rank that holds none is then given one of zeros, and
                what comes of it is dropped.
            gather_output: Whether callers get a sharded output whole.
            device: As for torch.nn layers.
            dtype: As for torch.nn layers.

        Raises:
            LayoutError: If a row split is to divide groups, or the packing does not fit.
        """
        self._features_dim, self._weight_dims = features_dim, weight_dims
        self._num_groups = groups
        first, in_features = next(iter(inputs.items()))
        self._first_input = first
        axes: dict[str, Axis] = {}
        weight: Whole | Shard = Whole()
        bias: Whole | Shard = Whole()
        output: Layout = Whole()
        layouts: dict[str, Layout] = {
            name: Whole(features_dim, size) for name, size in inputs.items()
        }
        if self.split == "row":
            self._expect_one_group(groups)
            axes, own = self._packing.divided("in", f"in_{self._word}", in_features)
            weight = Shard(weight_dims[1], own)
            layouts[first], output = Shard(features_dim, own), Partial()
        elif self.split == "column":
            own_inputs: Segments | None = None
            if groups == 1:
                name = f"out_{self._word}"
                axes, own = self._packing.divided("out", name, out_features)
            else:
                axes, own_inputs, own = self._groups(groups, in_features, out_features)
                layouts[first] = Shard(features_dim, own_inputs)
            is_first = weight_dims[0] == 0 or own_inputs is None
            weight = (
                Shard(weight_dims[0], own) if is_first else Shard(0, own_inputs or ())
            )
            bias, output = Shard(0, own), Shard(features_dim, own)
        self.declare(
            axes=axes,
            parameters={
                "weight": ParameterSpec(weight_shape, weight, init),
                "bias": None
                if bias_init is None
                else ParameterSpec((out_features,), bias, bias_init),
            },
            inputs=layouts,
            output=output,
            gather_output=gather_output,
            device=device,
            dtype=dtype,
        )
        holds_none = not self.weight.numel() and 0 not in weight_shape
        if holds_none and not takes_none:
            out, into = (max(1, self.weight.shape[dim]) for dim in weight_dims)
            self._filled = (out, into)

    def _groups(
        self, groups: int, in_features: int, out_features: int
    ) -> tuple[dict[str, Axis], tuple[Segment, ...], tuple[Segment, ...]]:
        """Return the axis of groups, and the segments of inputs and of outputs."""
        if self._packing != Packing():
            raise LayoutError(
                f"{self._packing} with groups={groups}: the groups are what stays together."
                " Leave unit, blocks and serves out."
            )
        own_inputs = Segment("group", in_features // groups)
        own_outputs = Segment("group", out_features // groups)
        return {"group": Axis(groups)}, (own_inputs,), (own_outputs,)

    def _expect_one_group(self, groups: int) -> None:
        if groups > 1:
            raise LayoutError(
                f"dim=0 divides the input {self._word}, which groups={groups} already"
                " separates. Use dim=1, which divides the groups."
            )

    @property
    def _word(self) -> str:
        """What torch calls the features: with dims of positions behind them, channels."""
        return "features" if self._features_dim == -1 else "channels"

    @property
    def own_weight(self) -> Tensor:
        """This rank's part of the weight, as `local_forward` reads it."""
        overlaps = self._spec_of("weight").grad == "overlapping"
        weight = self.shared("weight") if overlaps else self.weight
        for dim, size in zip(self._weight_dims, self._filled or (), strict=False):
            weight = _with_zeros(weight, dim, size)
        return weight

    @property
    def own_bias(self) -> Tensor | None:
        """This rank's part of the bias; None where it is added after the sum."""
        if self.bias is None or self.split == "row":
            return None
        overlaps = self._spec_of("bias").grad == "overlapping"
        bias = self.shared("bias") if overlaps else self.bias
        return bias if self._filled is None else _with_zeros(bias, 0, self._filled[0])

    @property
    def own_groups(self) -> int:
        """How many groups this rank computes, at least one; all where they are not divided."""
        if "group" not in self.axes:
            return self._num_groups
        return max(1, self.num_own("group"))

    def _computed(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `local_forward` gives; of a feature of zeros, where the rank has none."""
        if self._filled is None:
            return self.local_forward(*args, **kwargs)
        if not args:
            args = (kwargs.pop(self._first_input),)
        x = _with_zeros(args[0], self._features_dim, self._filled[1])
        output = self.local_forward(x, *args[1:], **kwargs)
        if self.split == "row":
            return output
        return output.narrow(self._features_dim, 0, 0)

    def finish(self, output: Tensor) -> Tensor:
        """Add the bias of a row split, once, after the sum over ranks."""
        if self.split != "row" or self.bias is None:
            return output
        behind = -1 - self._features_dim
        return output + self.bias.to(output.dtype).view(-1, *[1] * behind)


def _with_zeros(x: Tensor, dim: int, size: int) -> Tensor:
    """Return `x` with zeros behind it, so that `dim` has the given size."""
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim) if shape[dim] else x
