"""docs/other_code.md: its example runs on several ranks, its modules exist."""

import re
from pathlib import Path

import torch
import torchshard as ts
from torchshard.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "other_code.md").read_text("utf-8")


def example():
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(code, names)
    layer, penalty = names["layer"], names["penalty"]
    grad = ts.state.gathered(layer.weight.grad, layer, "weight")
    torch.manual_seed(0)
    dense = torch.nn.Linear(4, 6)
    want = dense.weight.square().sum()
    want.backward()
    torch.testing.assert_close(penalty, want)
    torch.testing.assert_close(grad, dense.weight.grad)
    torch.nn.init.xavier_uniform_(dense.weight)
    assert torch.equal(layer.weight.full(), dense.weight)


def test_the_example_is_the_dense_layers():
    """A penalty, its gradient and an initialiser, on three ranks."""
    run_ranks(example, 3)


def test_the_places_it_names_are_there():
    """Files of the repository, and names of the package."""
    for path in re.findall(r"`(torchshard/[\w/.]+\.py)`|\]\(([\w/.]+)\)", PAGE):
        file, link = path
        place = ROOT / file if file else ROOT / "docs" / link
        assert place.exists(), place
    for name in re.findall(r"`ts\.([\w.]+)", PAGE):
        found = ts
        for part in name.split("."):
            found = getattr(found, part)
