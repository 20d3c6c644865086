"""The files of a template, read whole: what is in them, and where their author finds them.

Whatever a template is made of, be it a folder, an archive, a repository, or a bundled one
with a file of the project's own in place of one of its files, it becomes one mapping from
path to file. Rendering, hashing and copying see the mapping alone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import TemplateError

FIELDS = "cookiecutter.json"
HOOKS = "hooks"
PARTIALS = "templates"
"""Folder of a template where cookiecutter looks for what its files import."""
SHARED = "_shared"
"""Folder beside templates with the partials that all of them may import."""

# The only variables in a template's paths: each is checked before anything is rendered.
_VARIABLES = ("_out", "_pkg", "_tests", "_py", "__module", "__layer", "__test")
_IN_PATH = re.compile(rf"\{{\{{ ?cookiecutter\.({'|'.join(_VARIABLES)}) ?\}}\}}")


@dataclass(frozen=True)
class TemplateFile:
    """One file of a template.

    Attributes:
        content: What is in it.
        label: Its path as its author calls it: `templates/linear/cookiecutter.json`.
        is_bundled: Whether it came with torchshard.
        is_shared: Whether it is a partial from the folder beside, for all templates.
    """

    content: bytes
    label: str
    is_bundled: bool = False
    is_shared: bool = False


Files = Mapping[str, TemplateFile]
"""Files by posix path relative to the template."""


def path_values(package: str, tests: str, module: str) -> dict[str, str]:
    """The value of each variable that may stand in a template's path.

    Args:
        package: Folder of the module, relative to the project's root.
        tests: Folder of the test, likewise.
        module: Name of the module's file, without `.py`.
    """
    return {
        "_out": ".",
        "_pkg": package,
        "_tests": tests,
        "_py": "py",
        "__module": module,
        "__layer": str(PurePosixPath(package, f"{module}.py")),
        "__test": str(PurePosixPath(tests, f"test_{module}.py")),
    }


def rendered_path(name: str, values: Mapping[str, str]) -> str:
    """Where the file `name` of a template lands, relative to the project's root.

    Args:
        name: Its path relative to the template.
        values: Those of `path_values`.
    """
    return str(PurePosixPath(_IN_PATH.sub(lambda match: values[match[1]], name)))


def read_folder(folder: Path, label: str, *, is_bundled: bool = False) -> Files:
    """The files under `folder` that belong to a template.

    Those are its `cookiecutter.json`, the folder that it renders, its partials and its
    hooks; a repository may hold what it likes besides.

    Args:
        folder: The folder of the template.
        label: The folder as its author calls it.
        is_bundled: Whether it came with torchshard.

    Raises:
        TemplateError: If a path in it cannot be used.
    """
    tops = (FIELDS, HOOKS, PARTIALS, *_output_folders(folder))
    return _read(folder, label, tops, is_bundled=is_bundled)


def read_overrides(folder: Path, label: str) -> Files:
    """Every file under `folder`: each is meant to take the place of a bundled one.

    Raises:
        TemplateError: If a path in it cannot be used.
    """
    tops = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    return _read(folder, label, tops)


def _read(
    folder: Path, label: str, tops: Iterable[str], *, is_bundled: bool = False
) -> Files:
    files = {}
    for path in _paths(folder, tops):
        name = path.relative_to(folder).as_posix()
        _check_path(f"{label}/{name}", name)
        if not is_bundled:
            _check_link(folder, path, f"{label}/{name}")
        files[name] = TemplateFile(path.read_bytes(), f"{label}/{name}", is_bundled)
    return files


def read_shared(parent: Path, label: str, *, is_bundled: bool = False) -> Files:
    """The partials in the folder `_shared` of `parent`, as files of each template beside.

    Raises:
        TemplateError: If one is a link that leaves the folder.
    """
    files = {}
    for path in sorted((parent / SHARED).glob("*.j2")):
        shown = f"{label}/{SHARED}/{path.name}"
        if not is_bundled:
            _check_link(parent / SHARED, path, shown)
        content = path.read_bytes()
        files[f"{PARTIALS}/{path.name}"] = TemplateFile(
            content, shown, is_bundled, is_shared=True
        )
    return files


def _output_folders(folder: Path) -> list[str]:
    """Names of the folders in `folder` that cookiecutter would render."""
    return [path.name for path in folder.iterdir() if "{{" in path.name]


def _paths(folder: Path, tops: Iterable[str]) -> Iterator[Path]:
    """The files at and below `tops`, sorted, without what Python leaves behind."""
    below = [path for top in tops for path in (folder / top).rglob("*")]
    for path in sorted([*(folder / top for top in tops), *below]):
        if path.is_file() and "__pycache__" not in path.relative_to(folder).parts:
            yield path


def _check_path(label: str, name: str) -> None:
    """Refuse a path that could leave the project or that Windows cannot hold."""
    plain = _IN_PATH.sub("x", name)
    climbs = ".." in _IN_PATH.sub(".", name).split("/")  # a folder can be "."
    if climbs or not re.fullmatch(r"[A-Za-z0-9_./-]+", plain) or ".." in plain:
        raise TemplateError(
            f"{label}: a template's path may hold letters, digits and "
            f"the variables {', '.join(_VARIABLES)} of cookiecutter"
        )


def _check_link(folder: Path, path: Path, label: str) -> None:
    """Refuse a link that would copy a file from outside the template into a layer."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TemplateError(f"{label} is a link that leaves the template")
