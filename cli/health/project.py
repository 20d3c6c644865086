"""The project in the working directory: its templates, its lock, names that hide others."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from ..errors import CliError, UsageError
from ..plan.states import check_files
from ..project.lock import LOCK_PATH, read_lock
from ..project.target import find_root
from ..screen.show import plural
from ..template.catalogue import Catalogue
from .finding import Finding

_SUBJECT = "project"
_IMPORTED = ("click", "cookiecutter", "jinja2", "numpy", "pytest", "rich", "torch")


def project_findings(templates: Catalogue) -> Iterator[Finding]:
    """What `check` would say, in a line; and what keeps it from saying it."""
    root = _root()
    templates = templates.in_project(root)
    yield Finding(_SUBJECT, "folder", str(root))
    yield _templates(templates)
    yield _lock(root, templates)
    yield from _hiding(Path.cwd())


def _root() -> Path:
    try:
        return find_root(Path())
    except UsageError:  # nothing was generated here yet
        return Path.cwd()


def _templates(templates: Catalogue) -> Finding:
    name = "templates"
    try:
        own = len(templates.own_names())
        total = len(templates.all())
    except CliError as error:
        problem = f"The templates cannot be read: {error}"
        return Finding(
            _SUBJECT, name, "unreadable", problem, "torchshard templates list"
        )
    return Finding(_SUBJECT, name, f"{total - own} bundled, {own} of this project")


def _lock(root: Path, templates: Catalogue) -> Finding:
    if not (root / LOCK_PATH).exists():
        return Finding(_SUBJECT, "lock", f"none: nothing is generated in {root.name}")
    try:
        num_layers = len(read_lock(root).layers)
        states = check_files(root, templates)
    except CliError as error:
        problem = f"The state of the generated files cannot be told: {error}"
        return Finding(_SUBJECT, "lock", "unusable", problem, "torchshard check")
    counts = Counter(state.state for state in states)
    files = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return Finding(_SUBJECT, "lock", f"{plural(num_layers, 'layer')}; files: {files}")


def _hiding(folder: Path) -> Iterator[Finding]:
    """Modules here that take the place of installed ones, as a user's torch.py does."""
    for name in _IMPORTED:
        for path in (folder / f"{name}.py", folder / name / "__init__.py"):
            if path.is_file():
                shown = path.relative_to(folder).as_posix()
                problem = f"{shown} here hides the installed package {name}."
                remedy = "give it another name"
                yield Finding(_SUBJECT, "name clash", shown, problem, remedy)
