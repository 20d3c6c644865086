"""Initialisers that draw the whole tensor's random numbers and keep this rank's.

`torch.manual_seed(s)` and a sharded layer give bit for bit the weights of the torch.nn layer,
at any group size, and leave the generator in the same state. The whole weight never exists:
the stream of torch's CPU generator is walked in chunks. torch draws a tensor of one kind in
one stream wherever a chunk is a multiple of 16 and the last one has at least 16 elements
(torch 2.13, `normal_fill` in ATen; uniform_ allows any chunk).

Numbers are always drawn on the CPU and then moved, also for a layer on another device: a
device's own stream would depend on the shape of the shard. Bounds are those of
`torch.nn.init`, with the fans of the whole tensor.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 20
"""Elements drawn at a time: 4 MiB of float32, a multiple of 16."""
_SHORTEST_TAIL = 16


@dataclass(frozen=True)
class Part:
    """Where a shard lies in its whole tensor.

    Attributes:
        shape: Shape of the whole tensor.
        dim: The sharded dim; 0 for a tensor that is not sharded.
        bounds: The half-open index ranges of `dim` that the shard holds.
    """

    shape: tuple[int, ...]
    dim: int
    bounds: tuple[tuple[int, int], ...]


class Initializer(ABC):
    """Sets a parameter, or this rank's shard of it, to its first values."""

    @property
    def is_random(self) -> bool:
        """Whether the values come from the random stream of this process."""
        return True

    @property
    def later(self) -> Initializer:
        """What sets the parameter when it is reset, after its first values."""
        return self

    @abstractmethod
    def fill(self, shard: Tensor, part: Part) -> None:
        """Set `shard`, which lies in its whole tensor as `part` says, in place."""


class StreamInitializer(Initializer):
    """An initialiser whose numbers come one after the other from torch's generator."""

    @abstractmethod
    def draw(self, buffer: Tensor) -> None:
        """Fill `buffer` with the next numbers of the stream, in place."""

    def fill(self, shard: Tensor, part: Part) -> None:
        """Walk the whole tensor's stream and keep the numbers that belong to `shard`."""
        drawn = torch.empty(shard.shape, dtype=shard.dtype)
        lead = math.prod(part.shape[: part.dim])
        rows = drawn.view(lead, -1) if drawn.numel() else drawn.new_empty(lead, 0)
        for start, stop in _chunks(math.prod(part.shape)):
            buffer = torch.empty(stop - start, dtype=shard.dtype)
            self.draw(buffer)
            _keep(rows, buffer, part, start)
        shard.copy_(drawn)


def _chunks(num_elements: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges to draw at once; a short tail joins the chunk before."""
    start = 0
    while start < num_elements:
        stop = start + _CHUNK
        if num_elements - stop < _SHORTEST_TAIL:
            stop = num_elements
        yield start, stop
        start = stop


def _keep(rows: Tensor, buffer: Tensor, part: Part, start: int) -> None:
    """Copy into `rows` what `buffer`, drawn from flat position `start`, has for the shard.

    A row is everything behind the dims in front of the sharded one.
    """
    behind = math.prod(part.shape[part.dim + 1 :])
    width = part.shape[part.dim] * behind
    offset = 0
    for row, num_rows, low, high in _blocks(start, start + len(buffer), width):
        length = num_rows * (high - low)
        block = buffer[offset : offset + length].view(num_rows, high - low)
        offset, place = offset + length, 0
        for first, last in part.bounds:
            begin, end = max(first * behind, low), min(last * behind, high)
            if begin < end:
                column = place + begin - first * behind
                target = rows[row : row + num_rows, column : column + end - begin]
                target.copy_(block[:, begin - low : end - low])
            place += (last - first) * behind


def _blocks(start: int, stop: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (row, number of rows, first column, end column): part of a row, or whole rows."""
    while start < stop:
        row, low = divmod(start, width)
        whole_rows = 0 if low else (stop - start) // width
        high = width if whole_rows else min(width, low + stop - start)
        num_rows = whole_rows or 1
        yield row, num_rows, low, high
        start += num_rows * (high - low)


@dataclass(frozen=True)
class Uniform(StreamInitializer):
    """Uniform on `-bound ... bound`, as `Tensor.uniform_`."""

    bound: float

    def draw(self, buffer: Tensor) -> None:
        """Fill `buffer` in place."""
        buffer.uniform_(-self.bound, self.bound)


@dataclass(frozen=True)
class Normal(StreamInitializer):
    """Normal with the given mean and standard deviation, as `Tensor.normal_`."""

    mean: float = 0.0
    std: float = 1.0

    def draw(self, buffer: Tensor) -> None:
        """Fill `buffer` in place."""
        buffer.normal_(self.mean, self.std)


@dataclass(frozen=True)
class Constant(Initializer):
    """One value everywhere; draws nothing, or `after` first, whose numbers it discards.

    torch.nn sometimes draws a bias and then overwrites it; `after` keeps the stream in step.
    """

    value: float
    after: Initializer | None = None

    @property
    def is_random(self) -> bool:
        """A constant is the same on every rank."""
        return False

    def fill(self, shard: Tensor, part: Part) -> None:
        """Set `shard` in place."""
        if self.after is not None:
            self.after.fill(shard, part)
        shard.fill_(self.value)


@dataclass(frozen=True)
class ZeroRow(Initializer):
    """`init`, then zeros at `index` of dim 0: the padding row of an embedding."""

    init: Initializer
    index: int

    def fill(self, shard: Tensor, part: Part) -> None:
        """Set `shard` in place; the rank that holds the row zeroes it."""
        self.init.fill(shard, part)
        if part.dim != 0:
            shard[self.index] = 0
            return
        place = 0
        for start, stop in part.bounds:
            if start <= self.index < stop:
                shard[place + self.index - start] = 0
            place += stop - start


@dataclass(frozen=True)
class Kept(Initializer):
    """The values that are there already."""

    @property
    def is_random(self) -> bool:
        """Nothing is drawn."""
        return False

    def fill(self, shard: Tensor, part: Part) -> None:
        """Leave `shard` as it is."""


@dataclass(frozen=True)
class Given(Initializer):
    """Values that the caller has: the whole tensor, of which each rank takes its part.

    For the first values only, so that the layer does not hold the whole tensor.

    Args:
        whole: The whole tensor.
        then: What a reset sets; None leaves the values that are there.
    """

    whole: Tensor
    then: Initializer | None = None

    @property
    def is_random(self) -> bool:
        """The caller answers for equal values on all ranks; rank 0's are sent anyway."""
        return True

    @property
    def later(self) -> Initializer:
        """What a reset sets."""
        return self.then or Kept()

    def fill(self, shard: Tensor, part: Part) -> None:
        """Set `shard` in place."""
        pieces: Sequence[Tensor] = [
            self.whole.narrow(part.dim, start, stop - start)
            for start, stop in part.bounds
        ]
        if pieces:
            shard.copy_(torch.cat(tuple(pieces), part.dim))


def kaiming_uniform(fan_in: int) -> Uniform:
    """Return the default of nn.Linear and nn.ConvNd weights (He et al. 2015, a = sqrt(5))."""
    if fan_in == 0:  # a layer without inputs has an empty weight
        return Uniform(0.0)
    gain = math.sqrt(2.0 / (1 + math.sqrt(5) ** 2))
    return Uniform(math.sqrt(3.0) * (gain / math.sqrt(fan_in)))


def fan_in_uniform(fan_in: int) -> Uniform:
    """Return the default of nn.Linear and nn.ConvNd biases: bound 1 / sqrt(fan_in)."""
    return Uniform(1 / math.sqrt(fan_in) if fan_in > 0 else 0.0)


def xavier_uniform(fan_in: int, fan_out: int) -> Uniform:
    """Return Glorot and Bengio's (2010) uniform initialiser."""
    std = math.sqrt(2.0 / float(fan_in + fan_out))
    return Uniform(math.sqrt(3.0) * std)


def xavier_normal(fan_in: int, fan_out: int) -> Normal:
    """Return Glorot and Bengio's (2010) normal initialiser."""
    return Normal(0.0, math.sqrt(2.0 / float(fan_in + fan_out)))
