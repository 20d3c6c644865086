"""Versions: of Python, of torchshard, and of what it needs. Imports none of them."""

import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from .finding import Finding

_SUBJECT = "versions"


def package_findings() -> Iterator[Finding]:
    """The versions, each held against what torchshard asks for."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding(_SUBJECT, "python", f"{python} ({sys.executable})")
    try:
        yield Finding(_SUBJECT, "torchshard", version("torchshard"))
    except PackageNotFoundError:
        problem = "torchshard runs from a checkout that is not installed."
        yield Finding(
            _SUBJECT, "torchshard", "not installed", problem, "pip install -e ."
        )
        return
    for requirement in requires("torchshard") or []:
        if ";" not in requirement:  # what an extra asks for
            yield _required(requirement)


def _required(requirement: str) -> Finding:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, requirement  # packaging tools write no other form
    name, bounds = match[0], requirement[match.end() :]
    remedy = f"pip install --upgrade '{requirement}'"
    try:
        found = version(name)
    except PackageNotFoundError:
        problem = f"{name} is not installed; torchshard needs {requirement}."
        return Finding(_SUBJECT, name, "missing", problem, remedy)
    if _is_within(found, bounds):
        return Finding(_SUBJECT, name, found)
    problem = f"{name} {found} is not {bounds}, which torchshard needs."
    return Finding(_SUBJECT, name, found, problem, remedy)


def _is_within(found: str, bounds: str) -> bool:
    """Whether a version is within bounds such as `>=2.7.1,<3`."""
    limits = re.findall(r"(>=|<)\s*([\d.]+)", bounds)
    return all(
        (_numbers(found) >= _numbers(limit)) == (sign == ">=") for sign, limit in limits
    )


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0a1+cpu` gives 2, 13, 0."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
