"""The plugin for pytest: marks, the fixture, and that it is in nobody's way."""

import subprocess
import sys
from importlib.metadata import entry_points

pytest_plugins = ["pytester"]

PASSING = """
import os
import pytest
import torch.distributed as dist
from torch import nn
from torchshard.distributed import get_group_size, get_rank
from torchshard.testing import Case, Floats, check_cases, check_layer
from layer_zoo import ParallelLinear

CASES = [
    Case(ParallelLinear, nn.Linear, (5, 7), sharding={"dim": dim}, inputs=[Floats((2, 5))])
    for dim in (0, 1)
]

def place(factor):
    return get_rank() * factor

@pytest.mark.ranks(1, 3)
def test_results_come_back_by_rank(run_ranks, world_size):
    assert run_ranks(place, 10) == [10 * rank for rank in range(world_size)]

def group_size():
    return get_group_size()

@pytest.mark.ranks(4)
class TestGroups:
    def test_group_size(self, run_ranks):
        assert run_ranks(group_size, group_size=2) == [2] * 4

    @pytest.mark.ranks(2)
    def test_the_nearest_mark_counts(self, run_ranks):
        assert run_ranks(group_size) == [2] * 2

@pytest.mark.parametrize("world_size", [2])
def test_world_size_may_be_parametrised_by_hand(run_ranks):
    assert len(run_ranks(group_size)) == 2

@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_case_of_a_layer(run_ranks, case):
    run_ranks(check_layer, case)

@pytest.mark.ranks(2, 3)
def test_all_cases_as_verify(run_ranks):
    run_ranks(check_cases, CASES)
"""


def lines_of(pytester, *arguments):
    """Run the plugin in a project of its own, where warnings are errors."""
    options = [
        "-Werror",
        "--strict-markers",
        "--strict-config",
        "-p",
        "no:cacheprovider",
    ]
    return pytester.runpytest_subprocess(*options, *arguments)


def test_marked_tests_run_on_each_number_of_ranks(pytester):
    """Marks on functions and classes, cases as parameters, results by rank."""
    pytester.makepyfile(PASSING)
    result = lines_of(pytester, "-v")
    result.assert_outcomes(passed=9)
    result.stdout.fnmatch_lines(
        [
            "*::test_results_come_back_by_rank[[]1-rank[]] PASSED*",
            "*::test_results_come_back_by_rank[[]3-ranks[]] PASSED*",
            "*::test_group_size[[]4-ranks[]] PASSED*",
            "*::test_the_nearest_mark_counts[[]2-ranks[]] PASSED*",
            "*::test_each_case_of_a_layer[[]*ParallelLinear(5, 7, dim=1) of (2x5)*PASSED*",
        ]
    )


def test_a_failure_shows_the_rank_s_own_traceback(pytester):
    """The test's line, the rank and its traceback, and nothing of the launcher."""
    pytester.makepyfile(
        """
        import time
        import pytest
        from torchshard.distributed import get_rank
        from torchshard.errors import RankError

        def body():
            if get_rank() == 1:
                raise ValueError("a reason of its own")

        @pytest.mark.ranks(2)
        def test_fails(run_ranks):
            run_ranks(body)

        def sleep():
            time.sleep(60)

        @pytest.mark.ranks(1, timeout_s=2)
        def test_time(run_ranks):
            run_ranks(sleep)

        @pytest.mark.ranks(2)
        def test_local(run_ranks):
            with pytest.raises(RankError, match="put it at the top level of a module"):
                run_ranks(lambda: None)
        """
    )
    result = lines_of(pytester)
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        [
            ">       run_ranks(body)",
            "E       torchshard.errors.RankError: body: rank 1 of 2 failed first.",
            "E       Traceback (most recent call last):",
            "E       *in body",
            "E       ValueError: a reason of its own",
            "E*RankError: sleep: rank 0 of 1 did not finish within 2 s and was killed.*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_plugin.py*")
    result.stdout.no_fnmatch_line("*ranks.py:*: RankError")


MARKS = [
    (
        "ranks",
        "run_ranks",
        "ranks takes numbers of ranks, such as ranks(1, 2, 4), not ()",
    ),
    ("ranks(0)", "run_ranks", "ranks takes numbers of ranks, such as*not (0,)"),
    ("ranks(True)", "run_ranks", "ranks takes numbers of ranks, such as*not (True,)"),
    ("ranks([2, 4])", "run_ranks", "ranks takes numbers of ranks*not ([[]2, 4],)"),
    ("ranks(2, timeout=1)", "run_ranks", "ranks takes timeout_s,*not timeout"),
    ("ranks(2)", "", "ranks does nothing without the fixture run_ranks*"),
    ("timeout(9)", "run_ranks", "*does not say on how many ranks it runs: mark it*"),
]
MARKED = """
import pytest

@pytest.mark.{mark}
def test_it({arguments}):
    pass
"""


def test_a_mark_that_says_nothing_is_an_error(pytester):
    """A test that would not run as it says is never passed over."""
    files = {
        f"test_{number}": MARKED.format(mark=mark, arguments=arguments)
        for number, (mark, arguments, _) in enumerate(MARKS)
    }
    pytester.makepyfile(**files)
    result = lines_of(pytester, "--continue-on-collection-errors")
    assert result.parseoutcomes() == {"errors": len(MARKS)}
    for _, _, words in MARKS:
        result.stdout.fnmatch_lines([f"*{words}"])
    result.stdout.no_fnmatch_line("*Traceback*")


def test_other_projects_do_not_notice(pytester):
    """Their fixtures of these names count, their doctests run, and torch is not imported."""
    pytester.makeconftest(
        """
        import sys
        import pytest

        @pytest.fixture
        def world_size():
            return "mine"

        @pytest.fixture
        def run_ranks():
            return "my own"

        def pytest_unconfigure():
            assert not {"torch", "torchshard", "cookiecutter"} & sys.modules.keys()
        """
    )
    pytester.makepyfile(
        other='''
        def double(x):
            """Twice.

            >>> double(2)
            4
            """
            return 2 * x
        ''',
        test_other="""
        def test_own(world_size, run_ranks):
            assert (world_size, run_ranks) == ("mine", "my own")
        """,
    )
    result = lines_of(pytester, "--doctest-modules")
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    assert "torchshard" in [plugin.name for plugin in entry_points(group="pytest11")]


def test_it_can_be_left_out(pytester):
    """`-p no:torchshard` takes the mark and the fixture away."""
    pytester.makepyfile("def test_it(run_ranks): pass")
    result = lines_of(pytester, "-p", "no:torchshard")
    result.stdout.fnmatch_lines(["*fixture 'run_ranks' not found"])


def test_pytest_starts_without_torch():
    """Loading the plugin imports nothing that takes time."""
    code = (
        "import sys, torchshard_cli.pytest_plugin\n"
        "heavy = {'torch', 'torchshard', 'click', 'rich', 'cookiecutter', 'jinja2'}\n"
        "assert not heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
