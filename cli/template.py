"""Templates on disk: find them, describe them, check the options given to one.

Reads `cookiecutter.json` and the list of files; renders nothing (`render.py` does).
"""

import difflib
import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import TemplateError, UsageError
from .layer import Value
from .names import did_you_mean

SHARED = "_shared"

# The only variables in a template's paths: each is checked before anything is rendered.
_PATH_VARIABLES = re.compile(
    r"\{\{ ?cookiecutter\.(_out|_pkg|_tests|__module|_py) ?\}\}"
)
_JINJA_OR_CONTROL = re.compile(r"\{[{%#]|[\x00-\x1f\x7f]")
_BOOLEANS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


@dataclass(frozen=True)
class Option:
    """An option of a template.

    Attributes:
        name: Its key in `cookiecutter.json`.
        default: Its value unless set.
        choices: The values that it may take; empty where any value of the default's type
            will do.
        help: One line for `torchshard templates show`.
    """

    name: str
    default: Value
    choices: tuple[Value, ...] = ()
    help: str = ""

    @property
    def kind(self) -> str:
        """What it accepts, in words."""
        if self.choices:
            return " | ".join(map(str, self.choices))
        return type(self.default).__name__

    def parse(self, text: str) -> Value:
        """The value that `text` means.

        Raises:
            UsageError: If it means none.
        """
        if self.choices:
            return self._choice(text)
        if isinstance(self.default, bool):
            return self._boolean(text)
        if isinstance(self.default, str):
            return self._text(text)
        try:
            return type(self.default)(text)
        except ValueError:
            raise UsageError(f"{self.name}={text} is not {self._article()}") from None

    def _choice(self, text: str) -> Value:
        by_text = {str(choice): choice for choice in self.choices}
        if text not in by_text:
            raise UsageError(
                f"{self.name}={text} is not one of {', '.join(by_text)}."
                f"{did_you_mean(text, by_text)}"
            )
        return by_text[text]

    def _boolean(self, text: str) -> bool:
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"{self.name}={text} is neither true nor false")
        return _BOOLEANS[text.lower()]

    def _text(self, text: str) -> str:
        if _JINJA_OR_CONTROL.search(text):
            raise UsageError(
                f"{self.name}={text!r} holds a control character or a template tag; "
                "plain text is expected"
            )
        return text

    def _article(self) -> str:
        return "an integer" if isinstance(self.default, int) else "a number"


@dataclass(frozen=True)
class Template:
    """A template, read from its folder.

    Attributes:
        name: Name of its folder.
        folder: The folder.
        title: One line that says what it generates.
        patterns: Globs of the class names that it fits.
        options: Its options, by name, in the order of `cookiecutter.json`.
    """

    name: str
    folder: Path
    title: str
    patterns: tuple[str, ...]
    options: Mapping[str, Option]

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
                f"  (see: torchshard templates show {self.name})"
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

    def files(self) -> list[Path]:
        """Every file of the template, relative to its folder."""
        return _files_under(self.folder)

    def outputs(self) -> list[str]:
        """What it writes, with `{package}`, `{tests}` and `{module}` for the variables."""
        words = {"_out": ".", "_pkg": "{package}", "_tests": "{tests}"}
        words |= {"__module": "{module}", "_py": "py"}
        paths = [path for path in self.files() if len(path.parts) > 1]
        named = [
            _PATH_VARIABLES.sub(lambda match: words[match[1]], path.as_posix())
            for path in paths
        ]
        return [path.removeprefix("./") for path in named]

    def content_hash(self) -> str:
        """Hash of all that decides what is rendered: its files and the shared partials."""
        shared = self.folder.parent / SHARED
        paths = [(self.name, self.folder / path) for path in self.files()]
        paths += [(SHARED, path) for path in sorted(shared.glob("*.j2"))]
        digest = hashlib.sha256()
        for owner, path in paths:
            content = path.read_bytes().replace(b"\r\n", b"\n")
            name = path.relative_to(self.folder.parent / owner).as_posix()
            digest.update(f"{owner}/{name} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()[:12]


def bundled_templates() -> Path:
    """The folder of the templates that come with torchshard.

    Found by path, as `importlib.resources` cannot see a mapped package in an editable
    install: beside the installed command line, or beside `cli` in a checkout.
    """
    parent = Path(__file__).resolve().parent.parent
    for candidate in (parent / "torchshard_templates", parent / "templates"):
        if (candidate / SHARED).is_dir():
            return candidate
    raise TemplateError(f"no templates beside {parent}; install torchshard again")


def list_templates(root: Path) -> list[str]:
    """Names of the templates under `root`, sorted."""
    return sorted(
        path.parent.name
        for path in root.glob("*/cookiecutter.json")
        if not path.parent.name.startswith("_")
    )


def load_template(root: Path, name: str) -> Template:
    """The template `name` under `root`.

    Raises:
        UsageError: If there is none.
        TemplateError: If its `cookiecutter.json` or a path in it cannot be used.
    """
    names = list_templates(root)
    if name not in names:
        raise UsageError(
            f"no template '{name}'.{did_you_mean(name, names)}"
            "  (see: torchshard templates list)"
        )
    folder = root / name
    _check_paths(folder)
    fields = _read_fields(folder / "cookiecutter.json")
    ours = fields.get("_torchshard", {})
    helps = ours.get("options", {})
    public = [key for key in fields if not key.startswith("_") and key != "class_name"]
    return Template(
        name=name,
        folder=folder,
        title=ours.get("title", ""),
        patterns=tuple(ours.get("names", ())),
        options={
            key: _read_option(
                folder, key, fields[key], helps.get(key, {}).get("help", "")
            )
            for key in public
        },
    )


def infer_template(root: Path, class_name: str) -> Template:
    """The template whose most specific pattern fits `class_name`.

    Raises:
        UsageError: If none fits, or several fit equally well.
    """
    templates = [load_template(root, name) for name in list_templates(root)]
    best = max((_fit(template, class_name) for template in templates), default=0)
    found = [template for template in templates if _fit(template, class_name) == best]
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


def _fit(template: Template, class_name: str) -> int:
    """How specifically `template` fits: the letters that its pattern spells out."""
    return max(
        (
            len(pattern.replace("*", ""))
            for pattern in template.patterns
            if fnmatch.fnmatchcase(class_name, pattern)
        ),
        default=0,
    )


def _files_under(folder: Path) -> list[Path]:
    return sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )


def _check_paths(folder: Path) -> None:
    """Refuse paths that could leave the project or that Windows cannot hold."""
    for path in _files_under(folder):
        plain = _PATH_VARIABLES.sub("x", path.as_posix())
        if not re.fullmatch(r"[A-Za-z0-9_./-]+", plain) or ".." in plain:
            raise TemplateError(
                f"{folder.name}/{path}: a template's path may hold letters, digits and "
                "the variables _out, _pkg, _tests, __module, _py of cookiecutter"
            )


def _read_fields(path: Path) -> dict[str, Any]:
    where = f"{path.parent.name}/{path.name}"
    try:
        fields = json.loads(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise TemplateError(f"{where}: not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise TemplateError(f"{where}:{error.lineno}: {error.msg}") from error
    if not isinstance(fields, dict) or "class_name" not in fields:
        raise TemplateError(f"{where}: an object with a 'class_name' is expected")
    return fields


def _read_option(folder: Path, name: str, raw: object, help_text: str) -> Option:
    if isinstance(raw, bool | int | float | str):
        return Option(name=name, default=raw, help=help_text)
    if isinstance(raw, list) and raw and all(isinstance(x, int | str) for x in raw):
        return Option(name=name, default=raw[0], choices=tuple(raw), help=help_text)
    raise TemplateError(
        f"{folder.name}/cookiecutter.json: option '{name}' is {raw!r}; "
        "a list of choices, a boolean, a number or a string is expected"
    )
