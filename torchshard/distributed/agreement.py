"""Checks between ranks, switched on by the environment variable TORCHSHARD_DEBUG=1.

They turn a hang or a silently wrong number into an error on every rank. Every check is one
exchange of what the ranks are about to do and with what (`facts`), so that ranks which take
different ways meet in a check and see it. Off, they cost one look at the environment; compiled
graphs leave them out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchshard.distributed.facts import Fact, elements_of, facts_of
from torchshard.distributed.groups import ShardGroup
from torchshard.distributed.running import where_it_runs
from torchshard.errors import GroupError

_ABSENT = Fact("absent")
# What `os.environ` reads: a look through itself takes 1.4 us, and every operation looks.
_VARIABLES: Mapping[Any, Any] = os.environ._data  # type: ignore[attr-defined] # CPython's
_NAME, _ON = os.environ.encodekey("TORCHSHARD_DEBUG"), os.environ.encodevalue("1")


def expect_same_call(name: str, x: Tensor, group: ShardGroup) -> None:
    """Check that every rank is about to run the collective `name`, on the same shape.

    Raises:
        GroupError: On every rank, if one of them has another collective, shape or dtype.
    """
    if is_debugging(group):
        _compared(f"{name} of {tuple(x.shape)}, {x.dtype}", {}, group)


def expect_whole(name: str, x: Tensor, group: ShardGroup) -> None:
    """Check that `x` is whole, the same on every rank, before `name` takes it for that.

    Raises:
        GroupError: On every rank, if the values of one of them differ from rank 0's.
    """
    if is_debugging(group):
        expect_alike(f"{name}{where_it_runs()}", {"x": x}, group)


def expect_alike(
    what: str,
    values: Mapping[str, Any],
    group: ShardGroup,
    *,
    pooled: Iterable[str] = (),
) -> None:
    """Check that every rank is about to do `what`, with the same values.

    Of shards, the layouts are compared; of plain tensors all elements.

    Args:
        what: What is done, for the error.
        values: What it is given, by name: tensors, numbers, words, and lists and dicts of them.
        group: The ranks.
        pooled: Names of tensors that hold each rank's own samples along dim 0.

    Raises:
        GroupError: On every rank, if one of them does another thing, or has another value.
    """
    if not is_debugging(group):
        return
    mine = facts_of(values, pooled)
    told = {name: fact for name, (fact, _) in mine.items()}
    seen = _compared(what, told, group)
    for name in dict.fromkeys(name for facts in seen for name in facts):
        each = [facts.get(name, _ABSENT) for facts in seen]
        if len({fact.words for fact in each}) > 1:
            raise _differs(what, name, [fact.words for fact in each])
        if len({fact.digest for fact in each}) > 1:
            _expect_equal(what, name, mine[name][1], group)


def is_debugging(group: ShardGroup) -> bool:
    """Return whether the ranks of `group` check what they do."""
    return group.size > 1 and is_on()


def is_on() -> bool:
    """Return whether checks are asked for, and no graph is being traced."""
    if torch.compiler.is_compiling():
        return False
    return bool(_VARIABLES.get(_NAME) == _ON)


def from_all_ranks(value: Any, group: ShardGroup) -> list[Any]:
    """Return the value of every rank, by rank."""
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def _compared(
    what: str, facts: Mapping[str, Fact], group: ShardGroup
) -> list[Mapping[str, Fact]]:
    """Return the facts of every rank, all of which are about to do `what`."""
    calls = from_all_ranks((what, facts), group)
    if len({call for call, _ in calls}) > 1:
        raise GroupError(
            f"The ranks' next collectives differ: {_by_rank(call for call, _ in calls)}."
            " Expected the same on all: give all ranks the same model and inputs of one"
            " shape and dtype, and let all take the same branches."
        )
    return [facts for _, facts in calls]


def _by_rank(words: Iterable[str]) -> str:
    return "; ".join(f"rank {rank}: {word}" for rank, word in enumerate(words))


def _differs(what: str, name: str, words: list[str]) -> GroupError:
    return GroupError(
        f"{name} of {what} differs between the ranks: {_by_rank(words)}. Expected the same on"
        " all ranks of a model group: the same batch, model and options."
    )


def _expect_equal(what: str, name: str, x: Tensor, group: ShardGroup) -> None:
    """Look at the elements of `x`, whose digests differ, on all ranks."""
    with torch._C.DisableTorchFunctionSubclass():
        own = elements_of(x)
    box = [own if group.rank == 0 else None]
    dist.broadcast_object_list(box, group=group.process_group, group_src=0)
    differences = from_all_ranks(_difference(own, box[0]), group)
    ranks = [rank for rank, difference in enumerate(differences) if difference]
    if ranks:
        listed = ", ".join(map(str, ranks))
        raise GroupError(
            f"{name} of {what} is taken for a whole tensor, the same on every rank, but on"
            f" rank {listed} it differs from rank 0's: rank {ranks[0]} has"
            f" {differences[ranks[0]]}. Give the ranks of a model group the same batch, and"
            " seed them alike."
        )


def _difference(own: Tensor | None, first: Tensor | None) -> str | None:
    """Return in words where `own` first differs from rank 0's tensor, None if nowhere."""
    if own is None or first is None:
        return None
    alike = (own == first) | ((own != own) & (first != first))
    if bool(alike.all()):
        return None
    place = tuple((~alike).nonzero()[0].tolist())
    return f"{own[place].item()} at {list(place)}, rank 0 {first[place].item()}"
