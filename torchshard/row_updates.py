"""Who updates the rows of a parameter in the middle of backward: a weak index.

A head that makes its weight's gradient chunk by chunk asks here, and hands each chunk on.
It knows no optimizer: `torchshard.optim.step_in_backward` enters them. What needs every
gradient, a norm or a scaler, asks here as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torchshard.errors import StateError

RowIndex: TypeAlias = "slice | Tensor"

_updates = WeakIdKeyDictionary()


class RowUpdate(Protocol):
    """Takes the gradient of one parameter, some rows at a time, instead of its `.grad`."""

    @property
    def is_alive(self) -> bool:
        """Whether there is still something to update for."""

    def begin(self) -> None:
        """Begin a backward, before its first rows."""

    def step(self, rows: RowIndex, grad: Tensor) -> None:
        """Update `rows`, whose gradient is `grad`."""

    def end(self) -> None:
        """End the backward, after its last rows."""


def update_rows_by(update: RowUpdate, parameter: Tensor) -> None:
    """Enter `update` as the one that takes the gradient of `parameter` from now on."""
    _updates[parameter] = update


def row_update_of(parameter: Tensor) -> RowUpdate | None:
    """Return what updates the parameter during backward; None if its optimizer does.

    In a compiled graph none: the weight gets its gradient, and `optimizer.step()` uses it.
    """
    if torch.compiler.is_compiling():
        return None
    if parameter not in _updates:
        return None
    found: RowUpdate = _updates[parameter]
    return found if found.is_alive else None


def expect_whole_gradients(parameters: Iterable[Tensor], what: str) -> None:
    """Check that no parameter is updated in backward, where `what` needs its gradient.

    Raises:
        StateError: If one is.
    """
    if any(row_update_of(parameter) is not None for parameter in parameters):
        raise StateError(
            f"{what} needs every gradient, and a weight among them is updated during"
            " backward (step_in_backward), so that its gradient never exists. Leave one of"
            " the two out."
        )
