"""Imports run one way through the package."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "torchshard"
PACKAGE = "torchshard"

# From the bottom up: a module imports from its own level or from lower ones.
LEVELS = [
    ["errors", "layout", "packing", "splits"],
    ["distributed"],
    ["checks", "initializer", "owners", "row_updates"],
    ["optimizer_state", "shard_notes", "tensor"],
    ["data_parallel", "loss", "optimizer_checks", "optimizer_trial", "replicas"],
    ["layer"],
    ["conversion_plan"],
    [
        "amp",
        "checkpoint",
        "compatibility",
        "convert",
        "optim",
        "state",
        "utils",
    ],
    ["nn"],
    ["testing"],
    [""],
]


def level_of(module):
    """Return the level of `torchshard.<module>`; the package itself is the top."""
    first = module.split(".")[0]
    for level, names in enumerate(LEVELS):
        if first in names:
            return level
    raise LookupError(f"torchshard.{module} has no place in the order of imports")


def module_of(path):
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def lazy_nodes(tree):
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {child for function in functions for child in ast.walk(function)}


def typing_nodes(tree):
    """Return what stands under `if TYPE_CHECKING:`, which is never imported."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        child for block in blocks for part in block.body for child in ast.walk(part)
    }


def imported(tree):
    """Yield (absolute module names, whether inside a function) of each import."""
    lazy, unused = lazy_nodes(tree), typing_nodes(tree)
    for node in ast.walk(tree):
        if node in unused:
            continue
        if isinstance(node, ast.Import):
            yield [alias.name for alias in node.names], node in lazy
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            inside = base == PACKAGE
            names = [f"{base}.{alias.name}" for alias in node.names if inside]
            yield names or [base], node in lazy


def violations(module, tree):
    """Return what `module` imports from above itself."""
    wrong = []
    for names, is_lazy in imported(tree):
        for name in names:
            top, _, rest = name.partition(".")
            if top in ("cli", "torchshard_cli", "templates"):
                wrong.append(name)
            if top == "layer_zoo" and not (
                is_lazy and module in ("nn", "conversion_plan")
            ):
                wrong.append(name)
            if top == PACKAGE and level_of(rest) > level_of(module):
                wrong.append(name)
    return wrong


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: module_of(path) or PACKAGE
)
def test_no_module_imports_from_above_itself(path):
    """errors, layout < distributed < tensor < layer < state < nn < testing."""
    assert violations(module_of(path), ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("layout", "from torchshard.distributed import ops"),
        ("distributed.ops", "from torchshard import tensor"),
        ("tensor.sharded", "import torchshard.layer"),
        ("tensor", "def f():\n    from torchshard.testing import ranks"),
        ("layer", "from torchshard import ParallelLayer"),
        ("layer", "def f():\n    import layer_zoo"),
        ("loss.head_losses", "from torchshard.optim import step_in_backward"),
        ("nn", "import layer_zoo"),
        ("state", "from torchshard_cli import main"),
    ],
)
def test_an_upward_import_is_found(module, source):
    """Each way of importing upward is seen."""
    if source == "from torchshard import ParallelLayer":
        with pytest.raises(LookupError):
            violations(module, ast.parse(source))
    else:
        assert violations(module, ast.parse(source))
