"""`torchshard doctor`: whether torchshard can work here, and how to mend what cannot."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import click

from ..health.finding import Finding
from ..naming.numbers import Seconds
from ..screen.show import echo_json, plural, to_json
from ..template.catalogue import Catalogue


@click.command(short_help="Look for what keeps torchshard from working here.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(min=0, min_open=True),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="How long to wait for an answer of torch, the network or the ranks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone.")
@click.pass_context
def doctor(ctx: click.Context, timeout_s: float, as_json: bool) -> None:
    """Look for what keeps torchshard from working here, and say how to mend it.

    Shows versions, how torch was built, devices, the machine, the network, two ranks that
    talk to each other, and the project in this folder. Changes nothing.

    Exit code 0 if all is well, 1 if something is wrong.

    \b
    Examples:
      torchshard doctor
      torchshard doctor --json --timeout 20
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    findings = _examined(ctx.obj, timeout_s)
    problems = [finding for finding in findings if finding.problem]
    if as_json:
        fields = [asdict(finding) for finding in findings]
        echo_json(to_json({"healthy": not problems, "findings": fields}))
    else:
        click.echo("\n".join([*_lines(findings), "", *_problem_lines(problems)]))
    ctx.exit(1 if problems else 0)


def _examined(templates: Catalogue, timeout_s: float) -> list[Finding]:
    """All findings; on a terminal with a sign of life, since ranks take seconds."""
    from rich.console import Console

    # Here, so that no other command waits for what they import.
    from ..health.machine import machine_findings
    from ..health.network import network_findings
    from ..health.packages import package_findings
    from ..health.project import project_findings
    from ..health.torch_build import torch_findings

    with Console(stderr=True).status("asking torch, and starting ranks"):
        return [
            *package_findings(),
            *torch_findings(timeout_s),
            *machine_findings(),
            *network_findings(timeout_s),
            *project_findings(templates),
        ]


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    """A section for each subject, a line for each finding; what is wrong is marked."""
    width = max(len(finding.name) for finding in findings)
    for subject in dict.fromkeys(finding.subject for finding in findings):
        yield subject
        for finding in findings:
            if finding.subject == subject:
                line = f"{finding.name:{width}}  {finding.value}"
                mark = click.style("!", fg="red") if finding.problem else " "
                yield f"{mark} {line}"


def _problem_lines(problems: Sequence[Finding]) -> Iterator[str]:
    """Each problem with its remedy, or that there is none."""
    if not problems:
        yield "All is well."
        return
    yield f"{plural(len(problems), 'problem')}:"
    for finding in problems:
        yield f"! {finding.problem}"
        yield f"    {finding.remedy}"
