"""The command line's rooms: imports run one way between them, and none is crowded."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "cli"
# From the bottom up: a module imports from its own room or from lower ones.
ROOMS = [
    "errors",
    "naming",
    "snake",
    "project",
    "template",
    "proof",
    "dense",
    "plan",
    "screen",
    "health",
    "commands",
    "main",
    "__main__",
    "pytest_plugin",
]
FILES_OF_A_ROOM = 12


def violations(module, source):
    """Return what `module`, dotted under cli, imports from a room above its own."""
    package = f"cli.{module}".rpartition(".")[0]
    own, wrong = ROOMS.index(module.split(".")[0]), []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = importlib.util.resolve_name(
            "." * node.level + (node.module or ""), package
        )
        names = [f"{base}.{alias.name}" for alias in node.names]
        names = names if base == "cli" else [base]
        wrong += [name for name in names if ROOMS.index(name.split(".")[1]) > own]
    return wrong


def dotted(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = sorted(path for path in ROOT.rglob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_no_module_imports_from_a_room_above(path):
    """errors < naming < project < template < proof < dense < plan < screen < commands."""
    assert violations(dotted(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("project.lock", "from ..plan.plan import Plan"),
        ("project.lock", "from ..screen import show"),
        ("template.trial", "def f():\n    from ..commands.verify import verify"),
        ("errors", "from .naming.names import NAME"),
        ("plan.apply", "from .. import main"),
    ],
)
def test_an_import_from_above_is_found(module, source):
    """Each way of importing from a room above is seen."""
    assert violations(module, source)


def test_a_room_has_few_files():
    """A reader who opens a room sees it whole."""
    for room in (path for path in ROOT.iterdir() if (path / "__init__.py").exists()):
        files = [path for path in room.glob("*.py") if path.stem != "__init__"]
        assert len(files) <= FILES_OF_A_ROOM, room.name
