"""torch's own databases: every operation and module is right on divided inputs, or refuses.

They stand in for all that nobody thought of. `make prove` tries every sample of both; CI the
modules on two ranks.
"""

import pytest
from database_cases import counted, names_of, sweep

NONE_OF = ("wrong", "foreign", "unlike", "hang")
OPERATIONS_AT_ONCE = 150
"""So many entries a launch of ranks: a hang costs the rest of its entry alone."""


def expect_no_fault(outcomes):
    faults = [one for one in outcomes if one.kind in NONE_OF]
    assert not faults, "\n".join(f"{kind}: {case}: {why}" for case, kind, why in faults)


def expect_modules(world_size, most):
    outcomes = sweep("modules", names_of("modules"), world_size, most)
    expect_no_fault(outcomes)
    counts = counted(outcomes)
    assert counts["right"] >= 0.6 * len(outcomes), counts


def test_modules_on_two_ranks():
    """Two samples of every module of torch.nn: none is wrong, six in ten are right."""
    expect_modules(2, 2)


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_samples_of_modules(world_size):
    """Every sample of every module of torch.nn: none is wrong, six in ten are right."""
    expect_modules(world_size, 10**9)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 3])
def test_operations(world_size):
    """Every sample of every operation of torch: none is wrong."""
    names = names_of("operations")
    for start in range(0, len(names), OPERATIONS_AT_ONCE):
        some = names[start : start + OPERATIONS_AT_ONCE]
        expect_no_fault(sweep("operations", some, world_size, timeout_s=1800))
