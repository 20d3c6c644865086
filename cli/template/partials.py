"""Which partials a template can come to import, as Jinja itself reads its files."""

from collections.abc import Iterator, Mapping
from typing import Any

from .template_files import FIELDS, PARTIALS, Files


def needed_partials(files: Files, fields: Mapping[str, Any]) -> set[str]:
    """The partials among `files` that the others import, or those that they import.

    All of them where a file computes the name of what it imports, or cannot be read: then
    rendering says what is wrong.
    """
    partials = {name for name in files if name.startswith(f"{PARTIALS}/")}
    needed: set[str] = set()
    waiting = [name for name in files if name not in partials and name != FIELDS]
    while waiting:
        for name in _imported(files[waiting.pop()].content, fields):
            if name is None:
                return partials
            path = f"{PARTIALS}/{name}"
            if path in partials - needed:
                needed.add(path)
                waiting.append(path)
    return needed


def _imported(content: bytes, fields: Mapping[str, Any]) -> Iterator[str | None]:
    """The names that a file imports, extends or includes; None for one it computes."""
    from cookiecutter.utils import create_env_with_context
    from jinja2.meta import find_referenced_templates

    context = {"cookiecutter": {**fields, "_extensions": []}}
    try:
        environment = create_env_with_context(context)
        yield from find_referenced_templates(environment.parse(content.decode()))
    except Exception:  # what a template can do wrong, and rendering will tell
        yield None
