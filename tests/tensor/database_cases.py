"""torch's own databases of operations and modules, as calls on whole and on divided tensors.

Every sample is called on whole tensors and on tensors that are divided: each tensor argument
alone along each of its dims, and along each dim of the first all those of the same size there.
"""

import importlib
import random
import warnings
from collections import Counter
from datetime import timedelta
from typing import NamedTuple

import numpy
import torch
import torch.distributed as dist
from sharded_cases import close, marked
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torchshard.distributed import groups
from torchshard.errors import TorchShardError
from torchshard.layout import balanced_ranges
from torchshard.tensor import ShardedTensor, whole
from torchshard.testing.ranks import run_ranks, tell

OUTCOMES = ("right", "refused", "random", "wrong", "foreign", "unlike", "hang")
"""`foreign`: an error that is not torchshard's; `unlike`: not the same on all ranks."""
_HANG_S = 20.0


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
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def names_of(database):
    """The entries of a database, each once."""
    return list(dict.fromkeys(_full_name(entry) for entry in _entries(database)))


def _entries(database):
    """The database; imported here, for seconds, as doctests import this module."""
    internal = "torch.testing._internal."
    if database == "modules":
        return importlib.import_module(internal + "common_modules").module_db
    methods = importlib.import_module(internal + "common_methods_invocations")
    # Random operations set a seed of their own there: they would not look random.
    methods.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return methods.op_db


def _full_name(entry):
    variant = getattr(entry, "variant_test_name", "")
    return f"{entry.name}.{variant}" if variant else entry.name


def samples_of(database, name, most):
    """The samples of one entry, at most so many, spread evenly over all of them."""
    entry = next(one for one in _entries(database) if _full_name(one) == name)
    seed()
    make = _of_module if database == "modules" else _of_operation
    samples = list(make(entry))
    step = max(1, -(-len(samples) // most))
    return samples[::step]


def _dtype(entry):
    dtypes = entry.supported_dtypes("cpu")
    return next(
        dtype
        for dtype in (torch.float64, torch.float32, torch.int64, *dtypes, None)
        if dtype in dtypes or dtype is None
    )


def _of_operation(entry):
    dtype = _dtype(entry)
    if dtype is None:
        return
    needs_grad = dtype.is_floating_point and entry.supports_autograd
    for number, sample in enumerate(
        entry.sample_inputs("cpu", dtype, requires_grad=needs_grad)
    ):
        yield Sample(
            f"{_full_name(entry)}#{number}",
            entry.op,
            (sample.input, *sample.args),
            sample.kwargs,
        )


def _of_module(entry):
    dtype = _dtype(entry)
    modes = (True, False) if entry.train_and_eval_differ else (True,)
    for training in modes:
        inputs = entry.module_inputs_func(
            entry, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for number, given in enumerate(inputs):
            if given.forward_input is None:
                continue
            made = given.constructor_input
            module = entry.module_cls(*made.args, **made.kwargs)
            module = module.to(dtype).train(training)
            yield Sample(
                f"{entry.name}#{number}{'' if training else ' eval'}",
                module,
                given.forward_input.args,
                given.forward_input.kwargs,
                tuple(module.parameters()),
                tuple((buffer, buffer.clone()) for buffer in module.buffers()),
            )


def ways_of(leaves):
    """Which dim of which tensors is divided: each alone, and all that are alike."""
    tensors = [i for i, leaf in enumerate(leaves) if _can_be_divided(leaf)]
    ways = [{i: d} for i in tensors for d in range(leaves[i].dim())]
    for first in tensors[:1]:
        for dim in range(leaves[first].dim()):
            alike = [i for i in tensors if _is_alike(leaves[i], leaves[first], dim)]
            if len(alike) > 1:
                ways.append(dict.fromkeys(alike, dim))
    return ways


def _can_be_divided(leaf):
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
            ranges = balanced_ranges(leaf.shape[way[place]], groups.get_world_size())
            given.append(marked(fresh, way[place], ranges))
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
    for x in results:
        if isinstance(x, ShardedTensor):
            own = x.to_local().shape[x.sharding.dim]
            assert own == x.sharding.length, f"a shard of {own}: {x.sharding}"
    return [whole(x) if isinstance(x, Tensor) else x for x in results]


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
        _SIDE.append(dist.new_group(timeout=timedelta(seconds=_HANG_S)))
    return _SIDE[0]


def outcome(sample, leaves, spec, way, dense):
    """Return the kind of one way, and why."""
    pair, error = _tried(sample, leaves, spec, way)
    code = 0 if error is None else 1 if isinstance(error, TorchShardError) else 2
    codes = _alike(code)
    if len(set(codes)) > 1:
        return (
            "unlike",
            f"{codes}: {type(error).__name__ if error else ''} {error or ''}",
        )
    if code:
        kind = "refused" if code == 1 else "foreign"
        return kind, f"{type(error).__name__}: {error}"
    copies, results = pair
    why = ""
    tolerance = 1e-8 if _precision(leaves) == torch.float64 else 1e-3
    try:
        mine = _gathered(results)
    except AssertionError as fault:
        why, mine = str(fault), None
    if mine is None or max(_alike(why != "")):
        return "wrong", why
    want_results, want_grads = dense
    try:
        _differences(mine, want_results, tolerance)
    except AssertionError as fault:
        why = str(fault)
    if max(_alike(why != "")):
        return "wrong", why
    if want_grads is not None:
        try:
            grads = _gradients(sample, copies, mine)
            _differences(grads or (), want_grads, tolerance)
        except Exception as fault:
            why = f"gradients: {type(fault).__name__} {fault}"
        if max(_alike(why != "")):
            return "wrong", why
    return "right", ""


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


def outcomes_of_sample(sample):
    """Yield what becomes of every way to divide one sample; none if torch itself refuses."""
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


def sweep_names(database, names, most):
    """In a rank: the outcomes of all samples of the entries; each is told as it starts."""
    warnings.simplefilter("ignore")
    default = dist.distributed_c10d._set_pg_timeout
    default(timedelta(seconds=_HANG_S), groups.model_group().process_group)
    done = []
    for name in names:
        for sample in samples_of(database, name, most):
            done.extend(outcomes_of_sample(sample))
        tell((name, done))
        done = []


def sweep(database, names, world_size, most=10**9, timeout_s=600):
    """Return the outcomes of the entries; what hangs is one, and ends its entry."""
    found, left = {}, list(names)
    while left:
        last = [""] * world_size

        def hear(rank, value):
            if isinstance(value, str):
                last[rank] = value  # noqa: B023
            elif rank == 0:
                found[value[0]] = value[1]

        try:
            run_ranks(
                sweep_names,
                world_size,
                database,
                left,
                most,
                timeout_s=timeout_s,
                on_told=hear,
            )
        except Exception as error:
            stuck = next(name for name in left if name not in found)
            found[stuck] = [Outcome(last[0], "hang", str(error))]
        left = [name for name in left if name not in found]
    return [result for results in found.values() for result in results]


def counted(outcomes):
    """How many of each kind there are."""
    counts = Counter(result.kind for result in outcomes)
    return {kind: counts[kind] for kind in OUTCOMES}
