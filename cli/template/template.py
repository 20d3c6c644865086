"""A template: what `cookiecutter.json` says of it, and the options given to it.

Made of files that were read already; `catalogue.py` finds them, `render.py` renders.
"""

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ..errors import TemplateError, UsageError
from ..naming.names import did_you_mean
from ..project.layer import Value
from .options import Option
from .template_files import (
    FIELDS,
    HOOKS,
    PARTIALS,
    SHARED,
    Files,
    path_values,
    rendered_path,
)

BUNDLED = "bundled"


@dataclass(frozen=True)
class Template:
    """A template, read whole.

    Attributes:
        name: Its name.
        files: Its files, with the partials that it shares with others.
        title: One line that says what it generates.
        class_name: The class that it generates unless another is named.
        patterns: Globs of the class names that it fits.
        options: Its options, by name, in the order of `cookiecutter.json`.
        origin: Where it comes from: `bundled`, a folder or what it was fetched from.
        source: What to fetch it from again; empty for one that is found by its name.
        is_trusted: Whether it may be rendered, which can run any code.
    """

    name: str
    files: Files
    title: str
    class_name: str
    patterns: tuple[str, ...]
    options: Mapping[str, Option]
    origin: str = BUNDLED
    source: str = ""
    is_trusted: bool = True

    @property
    def label(self) -> str:
        """Its folder as its author calls it: `templates/linear`."""
        return self.files[FIELDS].label.removesuffix(f"/{FIELDS}")

    @property
    def has_hooks(self) -> bool:
        """Whether it runs scripts of its own around the rendering."""
        return any(name.startswith(f"{HOOKS}/") for name in self.files)

    @property
    def needs_reading(self) -> bool:
        """Whether it renders what `new-layer --from` reads, and nothing without that."""
        files = self.files.values()
        return any(b"cookiecutter._reading" in file.content for file in files)

    @property
    def overridden(self) -> list[str]:
        """Of a bundled template, the files that the project replaces."""
        if self.origin != BUNDLED:
            return []
        return sorted(name for name, file in self.files.items() if not file.is_bundled)

    def short_names(self) -> dict[str, str]:
        """The short name of each file, which a person can type, by its path."""
        words = path_values("package", "tests", "module")
        return {
            path: PurePosixPath(rendered_path(path, words)).name for path in self.files
        }

    def parse_options(self, settings: Iterable[str]) -> dict[str, Value]:
        """The values that `settings`, each `key=value`, give to options.

        Raises:
            UsageError: If an option is unknown or given twice, or a value does not fit.
        """
        values: dict[str, Value] = {}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise UsageError(f"--set {setting} is not of the form key=value")
            if key in values:
                raise UsageError(f"--set {key} is given twice")
            values[key] = self._option(key).parse(text)
        return values

    def _option(self, name: str) -> Option:
        if name == "class_name":
            raise UsageError(
                "class_name is no option; it is the NAME given on the command line:"
                " torchshard new-layer NAME"
            )
        if name not in self.options:
            raise UsageError(
                f"template '{self.name}' has no option '{name}'."
                f"{did_you_mean(name, self.options)}"
                f"  (see: torchshard templates show {self.source or self.name})"
            )
        return self.options[name]

    def complete(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """Every option with its value: the one in `values`, or else the default.

        A value of an option that the template no longer has is left out.

        Raises:
            UsageError: If a value is no longer one of the option's choices.
        """
        return {
            name: option.parse(str(values[name])) if name in values else option.default
            for name, option in self.options.items()
        }

    def fit(self, class_name: str) -> int:
        """How specifically it fits: the letters that its best pattern spells out."""
        return max(
            (
                len(pattern.replace("*", ""))
                for pattern in self.patterns
                if fnmatch.fnmatchcase(class_name, pattern)
            ),
            default=0,
        )

    def outputs(
        self,
        package: str = "{package}",
        tests: str = "{tests}",
        module: str = "{module}",
    ) -> list[str]:
        """What it writes for a layer in that package and module, with a test there."""
        values = path_values(package, tests, module)
        return [rendered_path(name, values) for name in self._rendered_files()]

    def _rendered_files(self) -> Iterator[str]:
        for name in self.files:
            if name.partition("/")[0] not in (FIELDS, HOOKS, PARTIALS):
                yield name

    def needed_files(self) -> Files:
        """Its files, with those of the shared partials alone that it can come to import."""
        from .partials import needed_partials

        needed = needed_partials(self.files, read_fields(self.files))
        return {
            name: file
            for name, file in self.files.items()
            if not file.is_shared or name in needed
        }

    def content_hash(self) -> str:
        """Hash of all that decides what is rendered, wherever it lies."""
        files = self.needed_files()
        digest = hashlib.sha256()
        for name in sorted(files, key=_hash_order):
            content = files[name].content.replace(b"\r\n", b"\n")
            partial = name.removeprefix(f"{PARTIALS}/")
            path = f"{self.name}/{name}" if partial == name else f"{SHARED}/{partial}"
            digest.update(f"{path} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()[:12]


def _hash_order(name: str) -> tuple[bool, PurePosixPath]:
    """Partials last: the place where they always stood in the hash."""
    return name.startswith(f"{PARTIALS}/"), PurePosixPath(name)


def read_template(
    name: str,
    files: Files,
    *,
    origin: str = BUNDLED,
    source: str = "",
    is_trusted: bool = True,
) -> Template:
    """The template that `files` make.

    Raises:
        TemplateError: If its `cookiecutter.json`, or a folder in it, cannot be used.
    """
    fields = read_fields(files)
    _check_output_folders(files)
    ours = fields.get("_torchshard", {})
    helps = ours.get("options", {})
    public = [key for key in fields if not key.startswith("_") and key != "class_name"]
    return Template(
        name=name,
        files=files,
        title=ours.get("title", ""),
        class_name=str(fields["class_name"]),
        patterns=tuple(ours.get("names", ())),
        options={
            key: _read_option(
                files, key, fields[key], helps.get(key, {}).get("help", "")
            )
            for key in public
        },
        origin=origin,
        source=source,
        is_trusted=is_trusted,
    )


def read_fields(files: Files) -> dict[str, Any]:
    """The `cookiecutter.json` of `files`.

    Raises:
        TemplateError: If it is not an object in JSON that names a class.
    """
    file = files[FIELDS]
    try:
        fields = json.loads(file.content.decode())
    except UnicodeDecodeError as error:
        raise TemplateError(f"{file.label}: not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise TemplateError(f"{file.label}:{error.lineno}: {error.msg}") from error
    if not isinstance(fields, dict) or "class_name" not in fields:
        raise TemplateError(f"{file.label}: an object with a 'class_name' is expected")
    return fields


def _check_output_folders(files: Files) -> None:
    """Refuse a second folder to render, of which cookiecutter would take either."""
    folders = sorted({name.partition("/")[0] for name in files if name[:2] == "{{"})
    if len(folders) > 1:
        raise TemplateError(
            f"{files[FIELDS].label.removesuffix(f'/{FIELDS}')} has several folders to "
            f"render, {' and '.join(folders)}; one is expected"
        )


def _read_option(files: Files, name: str, raw: object, help_text: str) -> Option:
    if isinstance(raw, bool | int | float | str):
        return Option(name=name, default=raw, help=help_text)
    if isinstance(raw, list) and raw and all(isinstance(x, int | str) for x in raw):
        return Option(name=name, default=raw[0], choices=tuple(raw), help=help_text)
    raise TemplateError(
        f"{files[FIELDS].label}: option '{name}' is {raw!r}; "
        "a list of choices, a boolean, a number or a string is expected"
    )
