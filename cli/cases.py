"""What `torchshard verify` proves: a class, and the cases in its test, both imported.

Their modules are people's own and may do anything on import; whatever goes wrong there is
a `UsageError` with the error's own words. Imports no torch itself.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .names import did_you_mean

if TYPE_CHECKING:
    from torchshard.testing import Case


def load_class(target: str) -> type:
    """The class that `MODULE:CLASS` names, imported as from the working directory.

    Raises:
        UsageError: If there is none, or its module fails on import.
    """
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        raise UsageError(
            f"'{target}' is not of the form MODULE:CLASS, such as"
            " parallel_embedding:ParallelEmbedding"
        )
    module = _import(module_name, Path.cwd())
    if not hasattr(
        module, class_name
    ):  # a module may find names lazily, as a package does
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type)
        ]
        raise UsageError(
            f"module '{module_name}' has no class '{class_name}'."
            f"{did_you_mean(class_name, classes)}"
        )
    layer: Any = getattr(module, class_name)
    if not isinstance(layer, type):
        raise UsageError(f"{target} is not a class")
    return layer


def _import(module_name: str, folder: Path) -> ModuleType:
    """Import a module as it would be from `folder`, for the ranks too."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module can run anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            problem = (
                f"no module '{module_name}' in {folder} or among the installed ones"
            )
        else:
            problem = f"importing '{module_name}' failed: {_in_words(error)}"
        raise UsageError(problem + _install_hint(missing)) from error


def _in_words(error: BaseException) -> str:
    """The class of `error`, what it says, and the line that raised it."""
    words = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return words
    frames = traceback.extract_tb(error.__traceback__)
    place = [frame for frame in frames if not frame.filename.startswith("<frozen")][-1]
    return f"{words} ({Path(place.filename).name}, line {place.lineno})"


def _install_hint(missing: str | None) -> str:
    """What to do where the module that is missing lies below `src`."""
    top = (missing or "").partition(".")[0]
    source = Path("src") / top
    if not top or not (source.is_dir() or source.with_suffix(".py").is_file()):
        return ""
    return f"; {source.as_posix()} can be imported once installed: pip install -e ."


def load_cases(layer: type, cases_file: Path | None) -> tuple[Path, Sequence[Case]]:
    """The cases of `layer`, and the file that holds them: its test, unless one is named.

    Raises:
        UsageError: If there is no such file, it fails on import, or has no case of `layer`.
    """
    source = cases_file or _find_test(layer)
    if not source.is_file():
        raise UsageError(f"{source} is not a file")
    module = _import(source.stem, source.resolve().parent)
    listed = getattr(module, "CASES", None)
    if not isinstance(listed, Sequence):
        raise UsageError(
            f"{source} has no list CASES of torchshard.testing.Case, which says how to"
            " build the layer, what it must equal, and what to feed it"
        )
    cases = [case for case in listed if case.layer is layer]
    if not cases:
        raise UsageError(f"no case in {source} is of {layer.__name__}")
    return source, cases


def _find_test(layer: type) -> Path:
    """Return the test beside the layer's module, or in a `tests` folder above it."""
    file = Path(str(sys.modules[layer.__module__].__file__)).resolve()
    name = f"test_{file.stem}.py"
    folders = [file.parent, *(parent / "tests" for parent in file.parents)]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    raise UsageError(
        f"no {name} beside {file} or in a tests folder above it; name the file that holds"
        " the list CASES with --cases"
    )
