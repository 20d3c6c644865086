"""Recurrent networks: a batch may be divided, each rank running its own sequences.

Time and features may not: a step needs the one before it, and all features of both. Cells
are steps of a single sequence or of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torchshard.tensor.operands import Division, Labels, division, part
from torchshard.tensor.sharded import (
    first_sharded,
    local_call,
    mixes,
    rule,
)

_STATE: Labels = ("layer", "batch", "feature")
_PACKED = "of a packed sequence has no rule"


@rule(["lstm", "gru", "rnn_tanh", "rnn_relu"])
def _recurrent(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Run all steps; the output and the last states are divided as the batch is."""
    name = func.__name__
    if isinstance(args[3], list | tuple) or kwargs:
        raise mixes(name, first_sharded(args).sharding, _PACKED)
    x, state, weights, *options = args
    batch_first = options[-1]
    states = list(state) if name == "lstm" else [state]
    steps: Labels = ("batch", "time") if batch_first else ("time", "batch")
    labels = [(*steps, "feature"), *[_STATE] * len(states)]
    own, divided = _own_sequences(name, [x, *states], labels, weights)
    _expect_no_noise(name, divided, options)
    x, *states, weights = own
    state = tuple(states) if name == "lstm" else states[0]
    output, *last = local_call(func, (x, state, weights, *options), {})
    return (
        divided.marked(output, labels[0]),
        *[divided.marked(value, _STATE) for value in last],
    )


def _own_sequences(
    name: str,
    operands: list[Tensor],
    labels: list[Labels],
    weights: list[Tensor | None],
) -> tuple[list[Any], Division]:
    """Return this rank's part of the operands and the weights, and what is divided.

    Raises:
        ShardedOpError: If it is not the batch, or some rank has no sequence of it.
    """
    operands = [*operands, *(x for x in weights if x is not None)]
    numbered = [
        tuple(("weight", number, dim) for dim in range(x.dim()))
        for number, x in enumerate(weights)
        if x is not None
    ]
    divided = division(name, operands, [*labels, *numbered])
    if divided.label != "batch":
        raise mixes(name, divided.sharding, f"needs all of it ({divided.label})")
    divided.expect_some(name)
    num_inputs = len(labels)
    parts = [
        part(name, x, its, divided)
        for x, its in zip(operands[:num_inputs], labels, strict=True)
    ]
    own = [None if x is None else part(name, x, (), divided) for x in weights]
    return [*parts, own], divided


def _expect_no_noise(name: str, divided: Division, options: list[Any]) -> None:
    """Check that no layer drops out: its mask would be drawn inside torch's own code."""
    _, num_layers, dropout, training, *_ = options
    if dropout and training and num_layers > 1:
        why = "with dropout between its layers draws masks of the whole batch"
        raise mixes(name, divided.sharding, why)


@rule(["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"])
def _cell(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Take one step."""
    name = func.__name__
    given = dict(zip(("input", "hx", *_CELL_WEIGHTS), args, strict=False)) | kwargs
    x, state = given["input"], given["hx"]
    weights = [given.get(key) for key in _CELL_WEIGHTS]
    states = list(state) if name == "lstm_cell" else [state]
    labels: list[Labels] = [("batch", "feature")] * (1 + len(states))
    own, divided = _own_sequences(name, [x, *states], labels, weights)
    x, *states, own_weights = own
    state = states if name == "lstm_cell" else states[0]
    result = local_call(func, (x, state, *own_weights), {})
    if isinstance(result, Tensor):
        return divided.marked(result, labels[0])
    return tuple(divided.marked(value, labels[0]) for value in result)


_CELL_WEIGHTS = "w_ih", "w_hh", "b_ih", "b_hh"
