"""A template of the project's own, made from another: a copy, ready to edit."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..errors import UsageError, WriteError
from ..naming.names import did_you_mean, snake_case, suggested_class
from .catalogue import NAME, OWN, Catalogue
from .template import Template, read_fields
from .template_files import FIELDS, Files


def copied_files(template: Template, name: str) -> Files:
    """The files of a template `name` like `template`, with all that it needs of others.

    It has a title, a class and a pattern of its own, so that both can be told apart.
    """
    files = dict(template.needed_files())
    fields = read_fields(files)
    class_name = suggested_class(name)
    fields["class_name"] = class_name
    fields["_import"] = snake_case(class_name)
    ours = fields.setdefault("_torchshard", {})
    ours["title"] = f"Made from {template.name}; say here what it generates"
    ours["names"] = [f"*{class_name.removeprefix('Parallel')}"]
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    files[FIELDS] = replace(files[FIELDS], content=text.encode())
    return files


def overriding_file(template: Template, short_name: str) -> str:
    """The path of the file of `template` that a person calls `short_name`.

    Raises:
        UsageError: If it has none.
    """
    paths = {short: path for path, short in template.short_names().items()}
    if short_name not in paths:
        raise UsageError(
            f"template '{template.name}' has no file '{short_name}'."
            f"{did_you_mean(short_name, paths)} It has: {', '.join(sorted(paths))}"
        )
    return paths[short_name]


def check_template_name(name: str, templates: Catalogue) -> None:
    """Accept `name` for a new template.

    Raises:
        UsageError: If it cannot be a name, or is taken.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"'{name}' cannot name a template; "
            "a letter is expected, then letters, digits, _ and -"
        )
    if name in templates.own_names():
        raise UsageError(f"{OWN}/{name} is there already; choose another name")
    if name in templates.names():
        raise UsageError(
            f"'{name}' is a bundled template; choose another name, or change single "
            f"files of it: torchshard templates override {name} FILE"
        )


def write_folder(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Make the folder with those files, complete or not at all.

    Raises:
        WriteError: If the file system refuses.
    """
    with _scratch(folder, folder.parent) as scratch:
        for path, content in contents.items():
            (scratch / path).parent.mkdir(parents=True, exist_ok=True)
            (scratch / path).write_bytes(content)
        scratch.chmod(folder.parent.stat().st_mode)
        os.rename(scratch, folder)


def write_override(own: Path, path: str, content: bytes) -> None:
    """Make the file `path` below `own`, the folder of the project's templates.

    Raises:
        UsageError: If it is there.
        WriteError: If the file system refuses.
    """
    file = own / path
    if file.exists():
        raise UsageError(f"{OWN}/{path} is there already; edit it, or delete it first")
    with _scratch(file, own) as scratch:
        (scratch / "file").write_bytes(content)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.rename(scratch / "file", file)


@contextmanager
def _scratch(target: Path, folder: Path) -> Iterator[Path]:
    """A folder in `folder`, which need not exist, to make what is renamed to `target`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise WriteError(
            f"cannot write {target}: {error.strerror or error}; nothing was written"
        ) from error
