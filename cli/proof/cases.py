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

from ..errors import UsageError
from ..naming.names import did_you_mean

if TYPE_CHECKING:
    from torchshard.testing import Case


def load_class(target: str) -> type:
    """The class that `MODULE:CLASS` names, imported as from the working directory.

    MODULE may also be the path of a file, which is imported as part of its package.

    Raises:
        UsageError: If there is none, or its module fails on import.
    """
    module_name, colon, class_name = target.rpartition(":")
    if not colon or not module_name or not class_name:
        raise UsageError(
            f"'{target}' is not of the form MODULE:CLASS, such as"
            " parallel_embedding:ParallelEmbedding"
        )
    is_path = module_name.endswith(".py")
    module = (
        _import_file(Path(module_name)) if is_path else _import(module_name, Path.cwd())
    )
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


def _import_file(file: Path) -> ModuleType:
    """Import the module that a file holds, as part of the package that it lies in.

    Raises:
        UsageError: If there is no such file, or its name leads to another one.
    """
    if not file.is_file():
        raise UsageError(f"{file} is not a file")
    name, folder = _module_name(file.resolve())
    module = _import(name, folder)
    found = Path(str(module.__file__)).resolve()
    if found != file.resolve():
        raise UsageError(
            f"importing '{name}' gives {found}, not {file}; one of the two needs another"
            " name"
        )
    return module


def _module_name(file: Path) -> tuple[str, Path]:
    """The dotted name of a file's module, and the folder that it is imported from."""
    parts, folder = [file.stem], file.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts), folder


def _import(module_name: str, folder: Path) -> ModuleType:
    """Import a module as it would be from `folder`, for the ranks too."""
    if sys.path[:1] != [str(folder)]:
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
        hint = _install_hint(missing) or _package_hint(module_name, folder, error)
        raise UsageError(problem + hint) from error


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


def _package_hint(module_name: str, folder: Path, error: BaseException) -> str:
    """What to do where a module of a package was imported without it."""
    if "no known parent package" not in str(error):
        return ""
    file = folder.joinpath(*module_name.split(".")).with_suffix(".py")
    name, root = _module_name(file)
    if name == module_name:
        return ""
    return f"; it is part of a package: from {root}, it is {name}"


def load_cases(layer: type, cases_file: Path | None) -> tuple[Path, Sequence[Case]]:
    """The cases of `layer`, and the file that holds them: its test, unless one is named.

    Raises:
        UsageError: If there is no such file, it fails on import, or has no case of `layer`.
    """
    source = cases_file or _find_cases(layer)
    listed = getattr(_import_file(source), "CASES", None)
    if not isinstance(listed, Sequence):
        raise UsageError(
            f"{source} has no list CASES of torchshard.testing.Case, which says how to"
            " build the layer, what it must equal, and what to feed it"
        )
    cases = [case for case in listed if case.layer is layer]
    if not cases:
        raise UsageError(
            f"no case in {source} is of {layer.__name__}{_namesake(layer, listed)}"
        )
    return source, cases


def _namesake(layer: type, cases: Sequence[Case]) -> str:
    """What to do where the cases are of the same class, imported by another name."""
    for case in cases:
        module = getattr(case.layer, "__module__", "")
        if getattr(case.layer, "__name__", "") == layer.__name__:
            return (
                f" as {layer.__module__} defines it, but of {module}'s; torchshard verify"
                f" {module}:{layer.__name__}"
            )
    return ""


def _find_cases(layer: type) -> Path:
    """Return the test beside the layer's module, in a `tests` folder above it, or the module.

    `tests` may mirror the packages: `zoo/gate.py` and `tests/zoo/test_gate.py`.
    """
    module = sys.modules[layer.__module__]
    file = Path(str(module.__file__)).resolve()
    name = f"test_{file.stem}.py"
    packages = Path(*layer.__module__.split(".")[:-1])
    above = [parent / "tests" for parent in file.parents]
    for folder in (file.parent, *above, *(tests / packages for tests in above)):
        if (folder / name).is_file():
            return folder / name
    if hasattr(module, "CASES"):
        return file
    raise UsageError(
        f"no {name} beside {file} or in a tests folder above it; name the file that holds"
        " the list CASES with --cases"
    )
