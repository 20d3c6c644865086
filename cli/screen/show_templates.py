"""Templates as text for people and as JSON for programs."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..template.options import Option, value_text
from ..template.template import BUNDLED, Template
from .show import plural, to_json


def templates_lines(templates: Sequence[Template]) -> Iterator[str]:
    """A line for each template: its name, what it generates, where it comes from."""
    names = max((len(template.name) for template in templates), default=0)
    titles = max((len(template.title) for template in templates), default=0)
    for template in templates:
        row = f"{template.name:{names}}  {template.title:{titles}}"
        yield f"{row}  {_origin(template)}"


def divisions_of(template: Template) -> list[dict[str, Any]]:
    """How the finished layer of a bundled template can be divided; nothing of any other.

    As its class says it, so this imports torch. Each split has its `name`, the codes that
    `dim` takes for it, `dims`, and what it `divides`.
    """
    if template.origin != BUNDLED:
        return []
    import layer_zoo

    splits = getattr(getattr(layer_zoo, template.class_name, None), "splits", {})
    return [
        {"name": name, "dims": list(split.dims), "divides": split.divides}
        for name, split in splits.items()
    ]


def _origin(template: Template) -> str:
    count = len(template.overridden)
    files = f", {plural(count, 'file')} overridden" if count else ""
    return f"{template.origin}{files}"


def template_lines(
    template: Template, divisions: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str]:
    """All that a person needs to know to use a template."""
    yield f"{template.name}: {template.title}"
    yield from _option_lines(template)
    for number, division in enumerate(divisions):
        title = "divides:" if number == 0 else ""
        codes = " or ".join(f"dim={dim}" for dim in division["dims"])
        codes = f" ({codes})" if codes else ""
        yield f"{title:12} {division['name']}{codes}: {division['divides']}"
    if template.patterns:
        yield f"fits:        {', '.join(template.patterns)}"
    yield f"writes:      {', '.join(template.outputs())}"
    yield f"comes from:  {template.origin}"
    yield f"made of:     {', '.join(template.short_names().values())}"
    for name in template.overridden:
        short, label = template.short_names()[name], template.files[name].label
        yield f"overridden:  {short} by {label}"
    if not template.is_trusted:
        yield "not trusted: read its files; --trust lets them run"
    yield f"example:     {_example(template)}"


def _option_lines(template: Template) -> Iterator[str]:
    rows = [("class_name", "str", "(from the command line)")]
    rows += [
        (option.name, f"{option.kind}  [{_default(option)}]", option.help)
        for option in template.options.values()
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, kind, text in rows:
        yield f"  {name:{widths[0]}}  {kind:{widths[1]}}  {text}".rstrip()


def _default(option: Option) -> str:
    return value_text(option.default) or '""'


def _example(template: Template) -> str:
    """A command that works, with a choice that is none of the defaults if there is one."""
    words = ["torchshard", "new-layer", template.class_name]
    if template.needs_reading:
        return shlex.join([*words, "--from", "my_model:Layer"])
    words += ["-t", template.source or template.name]
    for option in template.options.values():
        other = [value for value in option.listed if value != option.default]
        if other:
            words += ["--set", f"{option.name}={value_text(other[0])}"]
            break
    return shlex.join(words if template.is_trusted else [*words, "--trust"])


def template_json(
    template: Template, divisions: Sequence[Mapping[str, Any]] = ()
) -> str:
    """One template for programs."""
    return to_json({**_fields(template), "splits": list(divisions)})


def templates_json(templates: Sequence[Template]) -> str:
    """All templates for programs."""
    return to_json([_fields(template) for template in templates])


def _fields(template: Template) -> dict[str, Any]:
    options = [vars(option) for option in template.options.values()]
    return {
        "name": template.name,
        "title": template.title,
        "names": list(template.patterns),
        "options": options,
        "writes": template.outputs(),
        "origin": template.origin,
        "files": {name: file.label for name, file in template.files.items()},
        "overridden": template.overridden,
        "trusted": template.is_trusted,
    }
