"""ClassLoss: what every loss over divided classes is asked for, and holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torchshard.distributed.groups import GroupLike
from torchshard.errors import ShapeError
from torchshard.initializer import Given
from torchshard.layer.base import ParallelLayer
from torchshard.layer.declaration import ParameterSpec
from torchshard.layout import Axis, Layout, Whole
from torchshard.loss.criterion import (
    Criterion,
    expect_criterion,
    reduced,
    target_weights,
)
from torchshard.splits import Split, Splits


class ClassLoss(ParallelLayer):
    """Base of losses over classes of which each rank holds some.

    Over R ranks, on rank r, with C classes:

        logits_r    (N, C / R) or (N, C / R, d1, ...)     shard, as its layer returned it
        target      (N,) or (N, d1, ...)                  whole
        weight      (C,)                                  whole, not trained
        loss        () or the target's shape              whole

    A subclass calls `super().__init__(criterion, group)`, sets its fields, and ends its
    constructor with `declare_loss`. Its `local_forward` returns the loss: most simply from the
    losses of the rows, equal on all ranks, which `put_together` weights and reduces.

    Args:
        criterion: Which rows count, and how they are put together.
        group: The ranks; None is the model group.

    Attributes:
        ignore_index: As in the criterion; `reduction`, `label_smoothing` and
            `lse_square_scale` too.
        weight: Weight of each class, or None.
        gather_target: Whether `target` is of this rank's own samples, which the loss then
            gathers.

    Example:
        >>> import torch, torchshard as ts
        >>> class ParallelSquaredLoss(ts.ClassLoss):
        ...     def __init__(self, weight=None, reduction="mean", *, group=None):
        ...         super().__init__(ts.loss.Criterion(reduction=reduction), group)
        ...         self.declare_loss(weight)
        ...
        ...     def local_forward(self, input, target):
        ...         rows = ts.loss.parallel_cross_entropy(input, target, reduction="none")
        ...         return self.put_together(rows**2, target)
        >>> ParallelSquaredLoss()(torch.zeros(2, 10), torch.tensor([1, 9]))
        tensor(5.3019)
    """

    splits: ClassVar[Splits] = {"classes": Split("the classes")}
    weight: Tensor | None

    def __init__(self, criterion: Criterion, group: GroupLike = None) -> None:
        super().__init__(group)
        self.ignore_index = criterion.ignore_index
        self.reduction = criterion.reduction
        self.label_smoothing = criterion.label_smoothing
        self.lse_square_scale = criterion.lse_square_scale
        self.gather_target = False

    def takes_own_samples(self, name: str) -> bool:
        """Return whether `name` holds each rank's own samples: the target may alone."""
        return self.gather_batch or (self.gather_target and name == "target")

    @property
    def criterion(self) -> Criterion:
        """What the loss of a row is, and how rows are put together."""
        return Criterion(
            self.ignore_index,
            self.reduction,
            self.label_smoothing,
            self.lse_square_scale,
        )

    def declare_loss(
        self,
        weight: Tensor | None = None,
        *,
        num_classes: int | None = None,
        parameters: Mapping[str, ParameterSpec | None] | None = None,
        inputs: Mapping[str, Layout] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Declare the class weights, and what the loss learns. Called at the constructor's end.

        Args:
            weight: Weight of each class, `(C,)`, equal on all ranks, or None.
            num_classes: C, for a loss with parameters of its own: the axis `"class"`. None
                for a loss of logits, which brings none.
            parameters: As in `declare`.
            inputs: As in `declare`. None for logits, which stay the shards that they are.
            device: As for torch.nn layers; without parameters, that of `weight`.
            dtype: As for torch.nn layers; without parameters, that of `weight`.

        Raises:
            ShapeError: If there is not one weight for each class.
            LayoutError: If the criterion is out of its range, or if `weight` requires grad.
        """
        spec = None
        if weight is not None:
            given = Given(weight, then=Given(weight))
            spec = ParameterSpec(tuple(weight.shape), Whole(), given)
            if not parameters:
                device, dtype = weight.device, weight.dtype
        own_size = 0 if weight is None else weight.numel()
        size = own_size if num_classes is None else num_classes
        expect_criterion(self.criterion, weight, size)
        self.declare(
            axes={} if num_classes is None else {"class": Axis(num_classes)},
            parameters=parameters or {},
            buffers={"weight": spec},
            inputs=inputs or {},
            output=Whole(),
            device=device,
            dtype=dtype,
        )

    def put_together(self, row_loss: Tensor, target: Tensor) -> Tensor:
        """Return the loss from that of each row, times its class weight, as `reduction` says.

        A mean divides by the sum of the class weights. Rows that are ignored count for nothing.

        Args:
            row_loss: Loss of each row, equal on all ranks, before class weights.
            target: Class of each row.

        Raises:
            ShapeError: If there is not one target for each row.
        """
        if target.is_floating_point() or target.shape != row_loss.shape:
            raise ShapeError(
                f"target has shape {tuple(target.shape)} and {target.dtype}; expected one"
                f" class for each row of {tuple(row_loss.shape)}."
            )
        dtype, criterion = row_loss.dtype, self.criterion._replace(lse_square_scale=0.0)
        columns = target.long()
        weights = target_weights(columns, self.weight, self.ignore_index, dtype)
        row_loss = weights * row_loss
        return reduced(row_loss, row_loss, columns, self.weight, criterion, dtype)[0]
