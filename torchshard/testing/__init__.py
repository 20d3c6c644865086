"""Tools to prove a sharded layer right: launch ranks, compare with the dense twin."""

from torchshard.testing.case import Case, Floats, Integers
from torchshard.testing.check import Checked, check_cases, check_layer
from torchshard.testing.ranks import run_ranks

__all__ = [
    "Case",
    "Checked",
    "Floats",
    "Integers",
    "check_cases",
    "check_layer",
    "run_ranks",
]
