"""The questions of `torchshard new-layer` on a terminal; each answer is checked at once.

Nothing is asked unless NAME is left out or `--interactive` given, so a script that runs on
a terminal never waits. The end of input and Ctrl-C end the command; nothing was written.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import click

from ..errors import ConflictError, UsageError
from ..naming.names import check_class_name
from ..plan.new_layer import Request, Start, find_start
from ..plan.plan import Plan
from ..project.layer import Value
from ..template.options import Option, value_text
from ..template.template import Template
from ..template.trust import require_trust
from .ask import is_interactive
from .show import plural


def require_terminal(*, needs_name: bool, is_plain: bool) -> None:
    """Accept that questions are asked.

    Args:
        needs_name: Whether they are asked because NAME is missing.
        is_plain: Whether the output is JSON, among which questions have no place.

    Raises:
        UsageError: If there is nobody to ask.
    """
    if is_interactive() and not is_plain:
        return
    if needs_name:
        raise click.UsageError("Missing argument 'NAME'.")
    if is_plain:
        raise UsageError("--interactive and --json exclude each other")
    raise UsageError(
        "--interactive needs a terminal; pass NAME, -t TEMPLATE and --set KEY=VALUE"
        "  (see: torchshard templates show TEMPLATE)"
    )


def interview(request: Request) -> Request:
    """`request` with what it leaves open answered by the person at the terminal.

    Raises:
        UsageError: If the folder, or something that was given, cannot be used.
        UntrustedError: If the template is not bundled, and nobody said that it may run.
    """
    if not request.class_name:
        request = replace(request, class_name=_ask_name(request))
    start, request = _start(request)
    template = start.template
    require_trust(template)
    if start.layer.reading:
        return request  # what was read of a dense class answers every question
    click.echo(f"template {template.name}: {template.title}")
    given = template.parse_options(request.settings)
    values = template.complete(start.layer.options)
    asked = [option for option in template.options.values() if option.name not in given]
    answers = [f"{one.name}={_ask_option(one, values[one.name])}" for one in asked]
    return replace(request, settings=(*request.settings, *answers))


def _ask_name(request: Request) -> str:
    def check(text: str) -> str:
        check_class_name(text, allow_shadow=request.allow_shadow)
        return text

    return _prompt("class name, such as ParallelEmbedding", check)


def _start(request: Request) -> tuple[Start, Request]:
    """What the request means; the template is asked for where the name tells none."""
    try:
        return find_start(request), request
    except UsageError:
        templates = request.templates.all()
        if request.template or any(one.fit(request.class_name) for one in templates):
            raise
    request = replace(request, template=_ask_template(templates))
    return find_start(request), request


def _ask_template(templates: Sequence[Template]) -> str:
    names = [template.name for template in templates]
    click.echo("template: the name fits none; pick one")
    return _choose("template", names, [template.title for template in templates])


def _ask_option(option: Option, default: Value) -> str:
    """The text of the value for `option`; Enter means `default`."""
    click.echo(f"{option.name}: {option.help}" if option.help else option.name)
    texts = [value_text(value) for value in option.listed]
    if texts and not any(text.isdecimal() for text in texts):
        return _choose(option.name, texts, default=value_text(default))
    question = f"{option.name} ({', '.join(texts)})" if texts else option.name

    def check(text: str) -> str:
        option.parse(text)
        return text

    return _prompt(question, check, value_text(default))


def _choose(
    question: str,
    texts: Sequence[str],
    notes: Sequence[str] = (),
    default: str | None = None,
) -> str:
    """One of `texts`, by its number or as it stands."""
    width = max(map(len, texts))
    for number, text in enumerate(texts, 1):
        note = notes[number - 1] if notes else ""
        click.echo(f"  {number}  {text:{width}}  {note}".rstrip())
    numbered = {str(number): text for number, text in enumerate(texts, 1)}

    def check(text: str) -> str:
        if text in texts:
            return text
        if text not in numbered:
            raise UsageError(f"a number from 1 to {len(texts)}, or a name, is expected")
        return numbered[text]

    return _prompt(question, check, default)


def _prompt(
    question: str, check: Callable[[str], str], default: str | None = None
) -> str:
    """The first answer that `check` accepts; what it says of the others is shown."""

    def checked(text: str) -> str:
        try:
            return check(text.strip())
        except UsageError as error:
            raise click.UsageError(str(error)) from error

    answer: str = click.prompt(question, default=default, value_proc=checked)
    return answer


def confirm(plan: Plan, command: str) -> None:
    """Go on only if the person says so, now that the plan is shown.

    Raises:
        ConflictError: If not.
    """
    if not plan.written:
        return
    question = f"write {plural(len(plan.written), 'file')}?"
    if not click.confirm(question, default=True):
        raise ConflictError("nothing was written")
    click.echo(f"the same without questions: {command}")
