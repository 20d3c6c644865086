"""An optimizer's step in the middle of backward, so that a gradient never exists whole.

A head that makes its weight's gradient chunk by chunk hands each chunk to the optimizer at
once. The optimizer stays torch's own: its groups, its schedulers and its state are where they
always are; what changes is when the rows of the weight are updated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchshard.distributed.groups import get_data_parallel_group
from torchshard.errors import GroupError, StateError
from torchshard.row_updates import RowIndex, row_update_of, update_rows_by

# Each element is updated from its own gradient and state alone, so rows can be by themselves.
_ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)


def step_in_backward(
    optimizer: Optimizer, parameters: nn.Module | Iterable[Tensor]
) -> None:
    """Have the heads that hold `parameters` update them during backward.

    For weights of `parallel_linear_cross_entropy`, its loss layer and the margin layers: their
    gradient, as large as the weight, then never exists, and neither do its memory and traffic.
    Training goes on as before: `backward()`, `optimizer.step()` for all other parameters,
    schedulers, `state_dict()`. With sampled classes, rows that were not sampled keep their
    weight and their state as they are.

    Under torch.compile the gradient is made after all, and `optimizer.step()` takes it. What
    needs the whole gradient cannot be had: its norm for clipping, its accumulation over
    several backwards, a GradScaler. The second backward before a `step()` raises, and so do a
    gradient that reaches the weight by another way, torchshard's `clip_grad_norm_` and
    its GradScaler's `step`. torch's own clipping and GradScaler cannot know, and raise nothing.

    Args:
        optimizer: One of torch's that work element by element: SGD, Adam, AdamW and their
            kin. It holds `parameters` already.
        parameters: The weights, or a module: then those of its parameters that
            `optimizer` holds.

    Raises:
        StateError: If the optimizer does not work element by element, or does not hold a
            parameter.
        GroupError: If the parameters are replicated over several data-parallel groups, whose
            gradients have to be averaged before a step.

    Example:
        >>> head = nn.Linear(4, 10)
        >>> optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
        >>> step_in_backward(optimizer, [head.weight])
    """
    if type(optimizer) not in _ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise StateError(
            f"{type(optimizer).__name__} cannot update some rows of a weight apart from the"
            f" others. Expected one of {names}."
        )
    replicas = get_data_parallel_group()
    if replicas is not None and replicas.size() > 1:
        raise GroupError(
            f"The weights are replicated over {replicas.size()} data-parallel groups; their"
            " gradients have to be averaged before a step. Use optimizer.step() alone."
        )
    held = {id(x): group for group in optimizer.param_groups for x in group["params"]}
    chosen = (
        [x for x in parameters.parameters() if id(x) in held]
        if isinstance(parameters, nn.Module)
        else list(parameters)
    )
    if not chosen or any(id(x) not in held for x in chosen):
        raise StateError("The optimizer does not hold the parameters to be updated.")
    for parameter in chosen:
        known = row_update_of(parameter)
        if not (isinstance(known, RowOptimizer) and known.steps_for(optimizer)):
            update_rows_by(RowOptimizer(optimizer, parameter), parameter)


class RowOptimizer:
    """Updates rows of one parameter as its optimizer would, once each a step.

    The rows are given to a second optimizer of the same class, with the group's settings and
    those rows of the state.
    """

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        # Weakly: an optimizer holds its parameters, and this is looked up by parameter.
        self._whole = weakref.ref(optimizer)
        self._weight = weakref.ref(parameter)
        like: Any = type(optimizer)
        self._rows: Optimizer = like([nn.Parameter(torch.empty(0))])
        self._is_pending = False
        self._group: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._scalars: dict[str, Any] = {}
        optimizer.register_step_pre_hook(self._expect_no_other_gradient)
        optimizer.register_step_post_hook(self._settle)

    @property
    def is_alive(self) -> bool:
        """Whether there still is an optimizer to step for."""
        return self._whole() is not None

    def steps_for(self, optimizer: Optimizer) -> bool:
        """Whether it is this optimizer's steps that it makes."""
        return self._whole() is optimizer

    @property
    def _optimizer(self) -> Optimizer:
        optimizer = self._whole()
        if optimizer is None:
            raise StateError("The optimizer that steps in backward is gone.")
        return optimizer

    @property
    def _parameter(self) -> Tensor:
        parameter = self._weight()
        if parameter is None:
            raise StateError("The weight that is stepped in backward is gone.")
        return parameter

    def _expect_no_other_gradient(self, *_: Any) -> None:
        """Check, before the optimizer's step, that it has nothing to do for the weight."""
        parameter = self._weight()
        if self._is_pending and parameter is not None and parameter.grad is not None:
            raise StateError(
                "The weight was updated in backward, and has a .grad besides: it is used"
                " elsewhere too, as a tied embedding or in a penalty. Its gradients have to"
                " be summed before a step: do not step this weight in backward."
            )

    def _settle(self, *_: Any) -> None:
        self._is_pending = False

    def begin(self) -> None:
        """Check that this is the one backward of the step.

        Raises:
            StateError: If there was another, or if the parameter has a gradient.
        """
        if self._is_pending:
            raise StateError(
                "A second backward came before optimizer.step(), and the first has updated"
                " the weight. Gradients cannot be accumulated, nor a step skipped (as by a"
                " GradScaler), where the step is made in backward."
            )
        if self._parameter.grad is not None:
            raise StateError(
                "The weight has a .grad beside the step that backward makes. Set it to None"
                " with zero_grad(), and use the weight in this loss alone."
            )
        self._is_pending, self._scalars = True, {}
        # All rows start from one state, also where the first of them create it.
        self._before = dict(self._optimizer.state[self._parameter])
        self._group = self._group_of(self._parameter)

    def step(self, rows: RowIndex, grad: Tensor) -> None:
        """Update `rows` of the parameter and of its state."""
        parameter = self._parameter
        chunk = nn.Parameter(parameter.detach()[rows])
        chunk.grad = grad
        self._rows.param_groups = [{**self._group, "params": [chunk]}]
        self._rows.state.clear()
        self._rows.state[chunk] = {
            name: _rows_of(value, parameter, rows)
            for name, value in self._before.items()
        }
        self._rows.step()
        if isinstance(rows, Tensor):
            parameter.detach()[rows] = chunk.detach()
        self._take(self._rows.state[chunk], parameter, rows)

    def _group_of(self, parameter: Tensor) -> dict[str, Any]:
        for group in self._optimizer.param_groups:
            if any(parameter is held for held in group["params"]):
                return group
        raise StateError("The optimizer no longer holds the weight that it updates.")

    def _take(
        self, rows_state: dict[str, Any], parameter: Tensor, rows: RowIndex
    ) -> None:
        """Put the rows' state back; what is one number for all rows waits for the end."""
        state = self._optimizer.state[parameter]
        for name, value in rows_state.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                self._scalars[name] = value
                continue
            if state.get(name) is None:
                state[name] = torch.zeros_like(parameter, dtype=value.dtype).detach()
            own = state[name][rows]
            if isinstance(rows, Tensor):
                state[name][rows] = value
            elif own.data_ptr() != value.data_ptr():
                own.copy_(value)

    def end(self) -> None:
        """Close the step: the number of steps advances once, whatever the number of chunks."""
        self._optimizer.state[self._parameter].update(self._scalars)
        torch.autograd.graph.increment_version(self._parameter)


def _rows_of(value: Any, parameter: Tensor, rows: RowIndex) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value[rows] if value.shape == parameter.shape else value.clone()
