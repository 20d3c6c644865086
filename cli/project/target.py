"""Where files land: the project's root, the package, the tests. Reads, never writes."""

import errno
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import UsageError

# What shows a project's root: the lock, or what a run that was killed left to be done.
_MARKS = ("lock.json", "journal.json")


@dataclass(frozen=True)
class Target:
    """A place for a layer.

    Attributes:
        root: Folder that nothing is ever written outside of; it holds the lock.
        package: Folder of the module, a posix path relative to `root`.
        tests: Folder of the test, likewise.
        import_prefix: Dotted name of the package; empty outside one.
    """

    root: Path
    package: str
    tests: str
    import_prefix: str

    @property
    def folder(self) -> Path:
        """Folder of the module."""
        return self.root / self.package

    @property
    def in_package(self) -> bool:
        """Whether the module becomes part of a package."""
        return bool(self.import_prefix)

    def import_path(self, module: str) -> str:
        """What to import `module` from."""
        return f"{self.import_prefix}.{module}" if self.import_prefix else module


def find_target(folder: Path) -> Target:
    """The target that `--into folder` means.

    Raises:
        UsageError: If it is no folder, or a package that nobody can import.
    """
    folder = resolved(folder)
    if folder.is_file():
        raise UsageError(f"--into {folder} is a file; a folder is expected")
    if not folder.is_dir():
        raise UsageError(f"--into {folder}: there is no such folder; make it first")
    if not (folder / "__init__.py").exists():
        return Target(root=folder, package=".", tests=".", import_prefix="")
    top = folder
    while (top / "__init__.py").exists():
        _check_importable(top)
        top = top.parent
    root = top.parent if top.name == "src" else top
    package, modules = folder.relative_to(root), folder.relative_to(top)
    # Where `tests` mirrors the packages, the test lies as its module does.
    places = ("tests" / modules, Path("tests"))
    return Target(
        root=root,
        package=package.as_posix(),
        tests=next((p for p in places if (root / p).is_dir()), package).as_posix(),
        import_prefix=".".join(modules.parts),
    )


def resolved(path: Path) -> Path:
    """`path`, absolute and without links.

    Raises:
        UsageError: If its links lead in a circle, or its name is too long.
    """
    try:
        path.stat()  # from Python 3.13 on, resolve() says nothing of a circle
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):
            raise UsageError(f"{path} cannot be used: {error.strerror}") from error
    return path.resolve()


def _check_importable(folder: Path) -> None:
    if not folder.name.isidentifier():
        raise UsageError(
            f"{folder} holds an __init__.py, but '{folder.name}' cannot be imported; "
            "rename the folder, or pass --into another"
        )


def inside(root: Path, path: str) -> Path:
    """The file that `path` means under `root`, symlinks followed.

    Raises:
        UsageError: If it lies outside `root`, or is a folder.
    """
    file = resolved(root / PurePosixPath(path))
    if not file.is_relative_to(resolved(root)):
        raise UsageError(f"{path} leads out of {root}, to {file}; nothing was written")
    if file.is_dir():
        raise UsageError(f"{path} is a folder; nothing was written")
    return file


def own_place(root: Path, path: str) -> Path:
    """The file at `path` under `root` itself: of a link, the link and not where it leads.

    Raises:
        UsageError: If it lies outside `root`.
    """
    folder = resolved(root / PurePosixPath(path).parent)
    if not folder.is_relative_to(resolved(root)):
        raise UsageError(
            f"{path} leads out of {root}, to {folder}; nothing was written"
        )
    return folder / PurePosixPath(path).name


def find_root(folder: Path) -> Path:
    """The nearest folder at or above `folder` that holds a lock.

    Raises:
        UsageError: If there is none.
    """
    for candidate in (folder.resolve(), *folder.resolve().parents):
        if any((candidate / ".torchshard" / name).is_file() for name in _MARKS):
            return candidate
    raise UsageError(
        f"no .torchshard/lock.json in {folder.resolve()} or above; "
        "`torchshard new-layer` writes one"
    )
