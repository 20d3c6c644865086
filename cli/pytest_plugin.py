"""The plugin for pytest: `@pytest.mark.ranks(2, 4)` and the fixture `run_ranks`.

    @pytest.mark.ranks(1, 2, 4, timeout_s=60)
    def test_equals_dense(run_ranks):
        run_ranks(check_cases, CASES)

pytest loads it in every project of the environment where torchshard is installed, at each
start. So it lives beside the command line, whose package imports no torch; the fixture
does, once a test launches ranks. `-p no:torchshard` leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

_MARK = "ranks"
_TIMEOUT_S = 120.0


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark, for `--markers` and `--strict-markers`."""
    config.addinivalue_line(
        "markers",
        f"{_MARK}(*world_sizes, timeout_s={_TIMEOUT_S:g}): run the test once for each"
        " number of ranks; its fixture run_ranks calls a function on that many.",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a marked test once for each number of ranks."""
    mark = metafunc.definition.get_closest_marker(_MARK)
    if mark is None:
        return
    problem = _problem(mark, metafunc.fixturenames)
    if problem:
        where = f"{metafunc.definition.nodeid}: @pytest.mark.{_MARK}"
        pytest.fail(f"{where} {problem}", pytrace=False)
    ids = [f"{size}-ranks" if size > 1 else "1-rank" for size in mark.args]
    metafunc.parametrize("world_size", mark.args, ids=ids)


def _problem(mark: pytest.Mark, fixtures: list[str]) -> str:
    """What is wrong with a mark; empty if nothing is."""
    sizes = mark.args
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        return f"takes numbers of ranks, such as {_MARK}(1, 2, 4), not {sizes}"
    unknown = ", ".join(mark.kwargs.keys() - {"timeout_s"})
    if unknown:
        return f"takes timeout_s, the seconds for each number of ranks, not {unknown}"
    if "world_size" not in fixtures:
        return (
            "does nothing without the fixture run_ranks, or world_size: make one of them"
            " an argument of the test"
        )
    return ""


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> int:
    """The number of ranks in this run of the test, from its mark."""
    pytest.fail(
        f"{request.node.nodeid} does not say on how many ranks it runs: mark it with"
        f" @pytest.mark.{_MARK}(2, 4), or parametrise world_size",
        pytrace=False,
    )


@pytest.fixture
def run_ranks(
    request: pytest.FixtureRequest, world_size: int
) -> Callable[..., list[Any]]:
    """Calls a function of a module on the test's number of ranks.

    As `torchshard.testing.run_ranks`, without the number: `run_ranks(body, *args)` gives
    what each rank returned, and takes `group_size` and `timeout_s` too.
    """
    mark = request.node.get_closest_marker(_MARK)
    limit_s = mark.kwargs.get("timeout_s", _TIMEOUT_S) if mark else _TIMEOUT_S

    def run(
        body: Callable[..., Any],
        *args: Any,
        group_size: int = -1,
        timeout_s: float = limit_s,
    ) -> list[Any]:
        __tracebackhide__ = True  # the test's line and the rank's traceback are left
        from torchshard.testing import run_ranks as launch

        return launch(
            body, world_size, *args, group_size=group_size, timeout_s=timeout_s
        )

    return run
