"""The templates at hand: the bundled ones, the project's own, and any that is fetched.

A project keeps its own in `.torchshard/templates`. A folder there is a template, or, under
the name of a bundled one, holds files that take the place of that one's files.
"""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import TemplateError, UnavailableError, UsageError
from ..naming.names import did_you_mean
from .source import (
    is_source,
    local_path,
    rooted_source,
    source_name,
    without_secret,
)
from .template import Template, read_template
from .template_files import (
    FIELDS,
    SHARED,
    Files,
    read_folder,
    read_overrides,
    read_shared,
)
from .trust import is_trusted_folder, untrusted

OWN = ".torchshard/templates"
NAME = re.compile("[A-Za-z][A-Za-z0-9_-]*")
"""What a template may be called; the header of a generated file holds it as one word."""


@dataclass(frozen=True)
class Catalogue:
    """The templates that a command can use.

    Attributes:
        bundled: Folder of those that come with torchshard.
        root: The project's root, from which sources that are relative paths count.
        own: Folder of the project's own; None if it has none.
        trusts_all: Whether templates that are not bundled may run.
        fetched: What this command fetched already, by source and root: one command sees
            one state of a repository.
    """

    bundled: Path
    root: Path = Path()
    own: Path | None = None
    trusts_all: bool = False
    fetched: dict[tuple[str, Path], Files] = field(default_factory=dict, repr=False)

    def in_project(self, root: Path) -> "Catalogue":
        """The same for the project at `root`: with the own ones of it, or of one around."""
        root = root.resolve()
        places = (folder / OWN for folder in (root, *root.parents))
        own = next((place for place in places if place.is_dir()), None)
        return replace(self, root=root, own=own)

    def trusting(self) -> "Catalogue":
        """The same, where every template may run."""
        return replace(self, trusts_all=True)

    def names(self) -> list[str]:
        """Names of all bundled and own templates, sorted.

        Raises:
            TemplateError: If a folder of the project's own is no template.
        """
        return sorted({*_names(self.bundled), *self.own_names()})

    def own_names(self) -> list[str]:
        """Names of the project's own templates and of those that it overrides, sorted.

        Raises:
            TemplateError: If a folder among them is neither.
        """
        if self.own is None:
            return []
        bundled = _names(self.bundled)
        folders = [path for path in self.own.iterdir() if path.is_dir()]
        names = sorted(path.name for path in folders if path.name[0] not in "._")
        for name in names:
            self._check_own(self.own / name, bundled)
        return names

    def _check_own(self, folder: Path, bundled: list[str]) -> None:
        label = f"{OWN}/{folder.name}"
        if not NAME.fullmatch(folder.name):
            raise TemplateError(
                f"{label}: a template's name is a letter, then letters, digits, _ and -"
            )
        if folder.name not in bundled and not (folder / FIELDS).is_file():
            raise TemplateError(
                f"{label} has no {FIELDS}, and no bundled template has its name."
                f"{did_you_mean(folder.name, bundled)}"
            )

    def all(self) -> list[Template]:
        """All bundled and own templates, by name."""
        return [self.load(name) for name in self.names()]

    def load(self, name: str, source: str = "") -> Template:
        """The template `name`, or that of `source` where there is one.

        Raises:
            UnavailableError: If there is none, or the source cannot be fetched.
            TemplateError: If its `cookiecutter.json` or a path in it cannot be used.
            UntrustedError: If a source would be fetched that may not run.
        """
        if source:
            return self._load_source(source)
        names = self.names()
        if name not in names:
            raise UnavailableError(
                f"no template '{name}'.{did_you_mean(name, names)}{_local_hint(name)}"
                "  (see: torchshard templates list)"
            )
        if name in _names(self.bundled):
            return self._load_bundled(name)
        return self._load_own(name)

    def _load_bundled(self, name: str) -> Template:
        label = f"{self.bundled.name}/{name}"
        files = {
            **read_folder(self.bundled / name, label, is_bundled=True),
            **self._bundled_partials(),
        }
        overrides = self._overrides(name, files)
        return read_template(
            name,
            {**files, **overrides},
            is_trusted=not overrides or self._trusts_own,
        )

    def _overrides(self, name: str, files: Files) -> Files:
        """The project's own files in place of the bundled `files`."""
        if self.own is None or not (self.own / name).is_dir():
            return {}
        overrides = read_overrides(self.own / name, f"{OWN}/{name}")
        for path, file in overrides.items():
            if path not in files:
                raise TemplateError(
                    f"{file.label} takes the place of no file of the bundled template "
                    f"'{name}'.{did_you_mean(path, files)} For a template with a file "
                    f"more: torchshard templates new NAME --from {name}"
                )
        return overrides

    def _load_own(self, name: str) -> Template:
        assert self.own is not None  # names() took the name from there
        files = {
            **self._bundled_partials(),
            **read_shared(self.own, OWN),
            **read_folder(self.own / name, f"{OWN}/{name}"),
        }
        return read_template(
            name, files, origin=_shown(self.own), is_trusted=self._trusts_own
        )

    def pick(self, text: str) -> Template:
        """The template that `-t text` means: a name, or a path or URL to fetch it from.

        Raises:
            UnavailableError: If there is none, or it cannot be fetched.
            TemplateError: If it cannot be read.
            UntrustedError: If it would be fetched and may not run.
        """
        if not is_source(text):
            return self.load(text)
        return self._load_source(rooted_source(text, self.root))

    def read(self, text: str) -> Template:
        """As `pick`, to look at or to copy: no trust is asked for, and none is given."""
        if not is_source(text):
            return self.load(text)
        source = rooted_source(text, self.root)
        return self._fetched(source, is_trusted=self._trusts_source(source))

    def _load_source(self, source: str) -> Template:
        if not self._trusts_source(source):
            shown = without_secret(source)
            raise untrusted(f"the template {shown} is not one of torchshard's own")
        return self._fetched(source, is_trusted=True)

    def _fetched(self, source: str, *, is_trusted: bool) -> Template:
        from .fetch import fetched_files

        key = source, self.root
        if key not in self.fetched:
            self.fetched[key] = fetched_files(source, self.root)
        files = {**self._bundled_partials(), **self.fetched[key]}
        return read_template(
            source_name(source),
            files,
            origin=without_secret(source),
            source=without_secret(source),
            is_trusted=is_trusted,
        )

    def _trusts_source(self, source: str) -> bool:
        path = local_path(source, self.root)
        return self.trusts_all or (path is not None and is_trusted_folder(path))

    @property
    def _trusts_own(self) -> bool:
        return self.trusts_all or (self.own is not None and is_trusted_folder(self.own))

    def _bundled_partials(self) -> Files:
        return read_shared(self.bundled, self.bundled.name, is_bundled=True)

    def infer(self, class_name: str) -> Template:
        """The template whose most specific pattern fits `class_name`.

        Raises:
            UsageError: If none fits, or several fit equally well.
        """
        templates = self.all()
        best = max((template.fit(class_name) for template in templates), default=0)
        found = [template for template in templates if template.fit(class_name) == best]
        if best and len(found) == 1:
            return found[0]
        names = ", ".join(template.name for template in found)
        if best:
            raise UsageError(
                f"several templates fit '{class_name}'. Pick one with -t: {names}"
            )
        raise UsageError(
            f"no template fits '{class_name}'.{_nearest_class(templates, class_name)}"
            f" Pick one with -t: {names}"
        )


def bundled_templates() -> Path:
    """The folder of the templates that come with torchshard.

    Found by path, as `importlib.resources` cannot see a mapped package in an editable
    install: beside the installed command line, or beside `cli` in a checkout.
    """
    parent = Path(__file__).resolve().parents[2]
    for candidate in (parent / "torchshard_templates", parent / "templates"):
        if (candidate / SHARED).is_dir():
            return candidate
    raise TemplateError(f"no templates beside {parent}; install torchshard again")


def _names(root: Path) -> list[str]:
    """Names of the templates under `root`, sorted."""
    names = (path.parent.name for path in root.glob(f"*/{FIELDS}"))
    return sorted(name for name in names if not name.startswith("_"))


def _shown(folder: Path) -> str:
    """`folder` as one would type it here."""
    path = os.path.relpath(folder)
    return path if path.startswith("..") else f"./{path}"


def _local_hint(name: str) -> str:
    """How to name a template that lies here, where its name alone means another thing."""
    lies_here = (Path(name) / FIELDS).is_file()
    return f" The folder here is -t ./{name}." if lies_here else ""


def _nearest_class(templates: Iterable[Template], class_name: str) -> str:
    """A sentence that offers the nearest name that a template fits, or nothing.

    `Parallel`, which nearly all names have in common, makes none of them near.
    """
    patterns = [pattern for template in templates for pattern in template.patterns]
    words = {pattern.replace("*", "").removeprefix("Parallel") for pattern in patterns}
    word = class_name.removeprefix("Parallel")
    prefix = class_name.removesuffix(word)
    nearest = difflib.get_close_matches(word, sorted(words), n=1)
    return f" Did you mean '{prefix}{nearest[0]}'?" if nearest else ""
