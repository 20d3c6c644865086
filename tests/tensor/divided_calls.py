"""A call on whole tensors, and the same on tensors that are divided: what becomes of it.

It is right, in results and gradients, or refused alike on all ranks; whatever else becomes of
it has a name here, so that a sweep goes on and says where it was.
"""

import random
from datetime import timedelta
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from sharded_cases import close, marked
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchshard.distributed import groups
from torchshard.errors import RankError, TorchShardError
from torchshard.layout import ranges_of_lengths
from torchshard.tensor import ShardedTensor, whole
from torchshard.testing.ranks import run_ranks, tell

OUTCOMES = ("right", "refused", "random", "wrong", "foreign", "unlike", "hang")
"""`foreign`: an error that is not torchshard's; `unlike`: not the same on all ranks."""
HANG_S = 20.0
_UNWRITTEN = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}


class Outcome(NamedTuple):
    """What became of one way to divide one sample."""

    case: str
    kind: str
    why: str = ""


class Sample(NamedTuple):
    """A call: the function, its arguments, what has gradients too, and what it may change."""

    name: str
    function: object
    args: tuple
    kwargs: dict
    parameters: tuple = ()
    buffers: tuple = ()


def seed(number=0):
    # torch.manual_seed notes a traceback for each kind of device, in milliseconds
    torch.default_generator.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def can_be_divided(leaf):
    return (
        type(leaf) in (Tensor, torch.nn.Parameter)
        and leaf.layout is torch.strided
        and leaf.dim() > 0
    )


def _is_alike(x, first, dim):
    return x.dim() == first.dim() and x.shape[dim] == first.shape[dim]


def _copied(leaves, way=None):
    """Return fresh leaves, and what the call is given: those of `way` divided."""
    copies, given = [], []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            given.append(leaf)
            continue
        fresh = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        copies.append(fresh)
        if way and place in way:
            dim, lengths = way[place]
            given.append(marked(fresh, dim, ranges_of_lengths(lengths)))
        else:
            given.append(fresh)
    return copies, given


def _called(sample, leaves, spec, way, number=0):
    """Call with the buffers as they were; return the leaves with what came out."""
    with torch.no_grad():
        for buffer, value in sample.buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)
    copies, given = _copied(leaves, way)
    args, kwargs = tree_unflatten(given, spec)
    seed(number)
    result = sample.function(*args, **kwargs)
    return copies, tree_flatten(result)[0]


def _gradients(sample, copies, results):
    """Return the gradients of inputs and parameters for random cotangents, or None."""
    roots = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    inputs = [x for x in (*copies, *sample.parameters) if x.requires_grad]
    if not roots or not inputs:
        return None
    cots = []
    for number, root in enumerate(roots):
        generator = torch.Generator().manual_seed(50 + number)
        cots.append(torch.randn(root.shape, generator=generator).to(root.dtype))
    unused = {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(roots, inputs, cots, **unused)


def _differences(mine, want, dtype_tolerance):
    """Raise where two lists of results differ."""
    assert len(mine) == len(want), "another number of results"
    for index, (own, dense) in enumerate(zip(mine, want, strict=True)):
        if not isinstance(dense, Tensor):
            assert own == dense or own != own, f"result {index}: {own} for {dense}"
            continue
        assert own.shape == dense.shape, f"result {index} of shape {tuple(own.shape)}"
        close(own.detach(), dense.detach(), f"result {index}", dtype_tolerance)


def _gathered(results):
    return [whole(x) if isinstance(x, Tensor) else x for x in results]


def _misplaced(results):
    """What a mark says that its shard does not bear out, or nothing."""
    for x in results:
        if isinstance(x, ShardedTensor):
            own = x.to_local().shape[x.sharding.dim]
            if own != x.sharding.length:
                return f"a shard of {own}: {x.sharding}"
    return ""


def _tried(sample, leaves, spec, way):
    """Return results of one way, or the error."""
    try:
        return _called(sample, leaves, spec, way), None
    except Exception as error:
        return None, error


def _alike(code):
    """Return the codes of all ranks: through a group of its own, for ranks that disagree."""
    codes = torch.zeros(groups.get_world_size(), dtype=torch.int64)
    codes[groups.get_rank()] = code
    dist.all_reduce(codes, group=_side())
    return codes.tolist()


_SIDE = []


def _side():
    if not _SIDE:
        _SIDE.append(dist.new_group(timeout=timedelta(seconds=HANG_S)))
    return _SIDE[0]


def outcome(sample, leaves, spec, way, dense):
    """Return the kind of one way, and why."""
    pair, error = _tried(sample, leaves, spec, way)
    why = _misplaced(pair[1]) if pair else ""
    code = 0 if error is None else 1 if isinstance(error, TorchShardError) else 2
    codes = _alike(3 if why else code)
    if 3 in codes:
        return "wrong", why
    if len(set(codes)) > 1:
        return (
            "unlike",
            f"{codes}: {type(error).__name__ if error else ''} {error or ''}",
        )
    if code:
        kind = "refused" if code == 1 else "foreign"
        return kind, f"{type(error).__name__}: {error}"
    copies, results = pair
    tolerance = 1e-8 if _precision(leaves) == torch.float64 else 1e-3
    mine = _gathered(results)
    want_results, want_grads = dense
    try:
        _differences(mine, want_results, tolerance)
    except AssertionError as fault:
        why = str(fault)
    if want_grads is not None:
        try:
            grads = _gradients(sample, copies, mine)
            _differences(grads or (), want_grads, tolerance)
        except Exception as fault:
            why = why or f"gradients: {type(fault).__name__} {fault}"
    return ("wrong" if max(_alike(why != "")) else "right"), why


def _precision(leaves):
    dtypes = {x.dtype for x in leaves if isinstance(x, Tensor)}
    narrow = {torch.float32, torch.float16, torch.bfloat16, torch.complex64} & dtypes
    return torch.float32 if narrow else torch.float64


def _is_random(sample, leaves, spec, dense):
    """Whether another seed gives another result, or nothing was written."""
    if sample.name.partition("#")[0] in _UNWRITTEN:
        return True
    try:
        _differences(_called(sample, leaves, spec, None, 1)[1], dense[0], 1e-8)
    except AssertionError:
        return True
    return False


def outcomes_of_sample(sample, ways_of):
    """Yield what becomes of every way to divide one sample; none if torch itself refuses.

    A way maps a tensor argument to a dim and to how many indices of it each rank holds.
    """
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    try:
        copies, results = _called(sample, leaves, spec, None)
        dense = results, _gradients(sample, copies, results)
    except Exception:
        return
    for way in ways_of(leaves):
        case = f"{sample.name} divided at {way} of {_shapes(leaves)}"
        tell(case)
        kind, why = outcome(sample, leaves, spec, way, dense)
        if kind in ("wrong", "unlike") and _is_random(sample, leaves, spec, dense):
            kind = "random"
        yield Outcome(case, kind, why)


def _shapes(leaves):
    return [tuple(x.shape) for x in leaves if isinstance(x, Tensor)]


def expect_short_waits():
    """In a rank: let a collective that others do not reach fail soon."""
    set_timeout = dist.distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=HANG_S), groups.model_group().process_group)


def run_told(body, world_size, *args, timeout_s=250, on_told=lambda rank, value: None):
    """Run ranks; return rank 0's result, or an error that names what each was at."""
    last = [""] * world_size

    def hear(rank, value):
        if isinstance(value, str):
            last[rank] = value
        on_told(rank, value)

    try:
        return run_ranks(body, world_size, *args, timeout_s=timeout_s, on_told=hear)[0]
    except RankError as error:
        raise Stuck(f"at {last}: {error}", last[0]) from error


class Stuck(Exception):
    """Ranks that wait for one another; the second argument is the call."""
