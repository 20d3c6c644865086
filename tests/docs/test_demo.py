"""The demo ends with a failure where the two trainings disagree."""

import copy
import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
ALONE = {"losses": [1.5, 0.25], "accuracy": 0.94, "head_bytes": 5160}
SHARDED = {"losses": [1.5, 0.250001], "accuracy": 0.94, "head_bytes": 2580}


def demo():
    spec = importlib.util.spec_from_file_location("demo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_trainings_that_agree():
    """Losses within 1e-5, the same accuracy and half of the head are agreement."""
    assert demo().disagreements(ALONE, SHARDED) == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("losses", [1.5, 0.2501], "the losses differ by more than 1e-05"),
        ("accuracy", 0.93, "the test accuracies differ"),
        ("head_bytes", 5160, "a rank does not hold half of the head"),
    ],
)
def test_trainings_that_disagree(key, value, words):
    """Each difference is named, and makes the demo fail."""
    other = copy.deepcopy(SHARDED) | {key: value}
    assert demo().disagreements(ALONE, other) == [words]
