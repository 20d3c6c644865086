"""Random numbers that differ between the shards of one tensor and nothing else.

Replicated tensors take the default stream, which all ranks seed alike. Shards take a stream
of their own, seeded by one draw from the default stream and the rank; afterwards the
default stream stands one draw further on every rank, so that replicated draws stay equal
and activation checkpointing, which rewinds the default stream, replays the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torchshard.distributed.groups import ShardGroup

_SEED_STRIDE = 0x9E3779B97F4A7C15
"""An odd 64-bit constant, so that seed + rank * stride never meets for two ranks."""


@contextmanager
def shard_rng(group: ShardGroup, device: torch.device) -> Iterator[None]:
    """Draw from this rank's own random stream inside the block.

    A no-op in a group of one. Inside a compiled graph, whose random stream is not this one,
    it is a no-op as well.
    """
    if group.size == 1 or torch.compiler.is_compiling():
        yield
        return
    seed = int(torch.randint(2**62, (), device="cpu").item())
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=_fork_type(device)):
        torch.manual_seed((seed + group.rank * _SEED_STRIDE) % 2**63)
        yield


def _fork_type(device: torch.device) -> str:
    """Return the device type whose streams `fork_rng` saves besides the CPU's."""
    return "cuda" if device.type == "cpu" else device.type
