"""An ArcFace head on real data, beside a plain softmax head, on one rank and on two."""

import importlib.util
import sys
from pathlib import Path

import pytest
from torchshard.testing import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "face_head.py"


def results():
    spec = importlib.util.spec_from_file_location("face_head", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    sys.modules["face_head"] = example
    spec.loader.exec_module(example)
    return example.results(6)


@pytest.mark.prove
def test_arcface_parts_the_classes_wider_on_one_rank_as_on_two():
    """Margin and accuracy of unseen digits are above those of a softmax head; losses agree."""
    one, two = run_ranks(results, 1)[0], run_ranks(results, 2)[0]
    assert one["ArcFace"]["margin"] > one["softmax"]["margin"] + 0.1
    assert one["ArcFace"]["accuracy"] >= one["softmax"]["accuracy"] > 0.9
    for head, run in one.items():
        assert run["losses"] == pytest.approx(two[head]["losses"], abs=1e-4)
        assert run["losses"][-1] < run["losses"][0] / 3
        assert run["margin"] == pytest.approx(two[head]["margin"], abs=1e-3)
