"""What the pages promise holds: their example layer is proved, their error is met."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_project import in_here

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "making_a_layer.md").read_text("utf-8")

TEST = '''
"""ParallelGatedUnit equals its dense form."""

import torch
import torch.nn.functional as F
import torchshard as ts
from torch import nn
from torchshard.testing import Case, Floats

from parallel_gated_unit import ParallelGatedUnit


class GatedUnit(nn.Module):
    def __init__(self, in_features, features):
        super().__init__()
        self.value = nn.Parameter(torch.empty(features, in_features))
        nn.init.kaiming_uniform_(self.value, 5**0.5)
        self.gate = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, input):
        value = F.linear(input, self.value)
        return value * torch.sigmoid(self.gate * value + self.shift)


'''


def example_layer() -> str:
    """Return the page's layer as a module."""
    code = re.findall(r"^(?:>>> |\.\.\. ?)(.*)$", PAGE, re.MULTILINE)
    end = next(
        i for i, line in enumerate(code) if line.startswith("ParallelGatedUnit(")
    )
    return "\n".join(code[:end]) + "\n"


def example_cases() -> str:
    return next(
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if block.startswith("CASES")
    )


def verified(folder: Path, layer: str) -> subprocess.CompletedProcess[str]:
    (folder / "parallel_gated_unit.py").write_text(layer, "utf-8")
    (folder / "test_parallel_gated_unit.py").write_text(TEST + example_cases(), "utf-8")
    target = "parallel_gated_unit:ParallelGatedUnit"
    return in_here(folder, "verify", target)


def test_the_example_layer_is_proved(tmp_path: Path) -> None:
    """The hand-written layer of the page passes `torchshard verify` on 1 to 4 ranks."""
    result = verified(tmp_path, example_layer())
    assert result.returncode == 0, result.stderr
    said = result.stdout.splitlines()[-1]
    assert said == "ParallelGatedUnit equals GatedUnit on 1, 2, 3, 4 ranks."


def test_the_error_of_the_page_is_met(tmp_path: Path) -> None:
    """Without `shared`, the gradient of the whole parameter is a partial, and is caught."""
    layer = example_layer().replace('self.shared("shift")', "self.shift")
    result = verified(tmp_path, layer)
    assert result.returncode == 1
    expected = re.search(r"^  2 ranks: (.*) \.\.\.$", PAGE, re.MULTILINE)
    assert expected is not None
    words = re.escape(expected[1]).replace("rank\\ 0", "rank\\ [01]")
    assert re.search(words, result.stderr), result.stderr


def shown(page: str, command: str) -> str:
    """Return what the page shows below `$ command`."""
    text = (ROOT / page).read_text("utf-8")
    found = re.search(
        rf"^\$ {command}\n(.*?)(?:\n\n|```)", text, re.MULTILINE | re.DOTALL
    )
    assert found is not None, f"{page} does not show {command}"
    return found[1].strip()


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("README.md", "torchshard new-layer ParallelEmbedding"),
        ("docs/making_a_layer.md", "torchshard new-layer ParallelGatedUnit -t blank"),
    ],
)
def test_the_pages_show_what_new_layer_prints(
    page: str, command: str, tmp_path: Path
) -> None:
    """The output on the page is that of the command, to the last count of lines."""
    words = [sys.executable, "-m", "torchshard_cli", *command.split()[1:]]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == shown(page, command)


def layers_of_the_table() -> list[tuple[str, str]]:
    """Return the layers and what is divided, row by row of the README's table."""
    text = (ROOT / "README.md").read_text("utf-8")
    table = text.split("| layer | divided |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    return [(layer.strip(), divided.strip()) for layer, divided in rows]


def test_the_readme_says_what_each_class_says_that_it_divides() -> None:
    """The column `divided` begins with the splits that the classes declare."""
    import layer_zoo

    found = 0
    for names, divided in layers_of_the_table():
        name = names.split("`")[1]
        splits = getattr(getattr(layer_zoo, name), "splits", {})
        ways = [
            f"`dim={split.dims[0]}` {split.divides}" if split.dims else split.divides
            for split in splits.values()
        ]
        assert divided.startswith("; ".join(ways)), name
        found += bool(ways)
    assert found >= 9
