"""Ranks that hold nothing of a dim, one index, or all: every rule is right or refuses alike."""

import warnings
from collections import Counter

import pytest
from divided_calls import (
    can_be_divided,
    expect_short_waits,
    outcomes_of_sample,
    run_told,
    seed,
)
from rule_samples import EXEMPT, samples
from torchshard.tensor import RULES

SPREADS = {
    "none, one and the others": lambda size: (0, min(size, 1), max(size - 1, 0)),
    "all and none": lambda size: (size, 0, 0),
}
"""How many of so many indices each of three ranks holds."""


def ways_of(spread):
    """The first two tensors, each alone and both together, along every dim."""

    def ways(leaves):
        tensors = [i for i, leaf in enumerate(leaves) if can_be_divided(leaf)][:2]
        for chosen in (tensors[:1], tensors[1:], tensors)[: 2 * len(tensors) - 1]:
            for dim in range(leaves[chosen[0]].dim()):
                sizes = {leaves[i].shape[dim] for i in chosen if leaves[i].dim() > dim}
                if len(sizes) == 1 and all(leaves[i].dim() > dim for i in chosen):
                    yield dict.fromkeys(chosen, (dim, SPREADS[spread](*sizes)))

    return ways


def reaching(name, reached):
    """Put in place of a rule one that notes that it was asked, under this name or a kin's."""
    rule = RULES[name]

    def noted(func, args, kwargs):
        reached.add(rule)
        return rule(func, args, kwargs)

    RULES[name] = noted
    return rule


def sweep(spread):
    """What became of the calls, and the samples that do not reach the rule of their name."""
    warnings.simplefilter("ignore")
    expect_short_waits()
    reached, missed, found = set(), [], []
    rules = {name: reaching(name, reached) for name in list(RULES)}
    for name, sample in samples():
        reached.clear()
        seed()
        found += outcomes_of_sample(sample, ways_of(spread))
        if rules[name] not in reached:
            missed.append(name)
    return found, missed


@pytest.mark.parametrize(
    "spread",
    ["none, one and the others", pytest.param("all and none", marks=pytest.mark.prove)],
)
def test_every_rule_holds_with_empty_shards(spread):
    """Zero, one and all indices on a rank give dense torch's result, or one error on all."""
    found, missed = run_told(sweep, 3, spread)
    bad = [one for one in found if one.kind not in ("right", "refused", "random")]
    assert not bad, "\n".join(f"{case}: {kind} {why}" for case, kind, why in bad)
    assert not missed, f"samples that do not reach the rule of their name: {missed}"
    counts = Counter(one.kind for one in found)
    assert counts["right"] > 2 * counts["refused"], counts


def test_every_rule_has_a_sample():
    """A rule without one says why it needs none."""
    named = {name for name, _ in samples()}
    assert set(RULES) - named - set(EXEMPT) == set()
    assert (named | set(EXEMPT)) - set(RULES) == set()
