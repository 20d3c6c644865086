"""torch's own databases of operations and modules, as calls whose tensors can be divided.

Each tensor argument is divided alone along each of its dims, and along each dim of the first
all those of the same size there.
"""

import importlib
import warnings
from collections import Counter

import torch
from divided_calls import (
    OUTCOMES,
    Outcome,
    Sample,
    Stuck,
    can_be_divided,
    expect_short_waits,
    outcomes_of_sample,
    run_told,
    seed,
)
from torchshard.distributed import groups
from torchshard.layout import balanced_ranges
from torchshard.testing.ranks import tell


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
    tensors = [i for i, leaf in enumerate(leaves) if can_be_divided(leaf)]
    ways = [{i: d} for i in tensors for d in range(leaves[i].dim())]
    for first in tensors[:1]:
        for dim in range(leaves[first].dim()):
            alike = [i for i in tensors if _is_alike(leaves[i], leaves[first], dim)]
            if len(alike) > 1:
                ways.append(dict.fromkeys(alike, dim))
    return [{i: _balanced(leaves[i], dim) for i, dim in way.items()} for way in ways]


def _balanced(x, dim):
    return dim, balanced_ranges(x.shape[dim], groups.get_world_size()).lengths


def _is_alike(x, first, dim):
    return x.dim() == first.dim() and x.shape[dim] == first.shape[dim]


def sweep_names(database, names, most):
    """In a rank: the outcomes of all samples of the entries; each is told as it starts."""
    warnings.simplefilter("ignore")
    expect_short_waits()
    done = []
    for name in names:
        for sample in samples_of(database, name, most):
            done.extend(outcomes_of_sample(sample, ways_of))
        tell((name, done))
        done = []


def sweep(database, names, world_size, most=10**9, timeout_s=600):
    """Return the outcomes of the entries; what hangs is one, and ends its entry."""
    found, left = {}, list(names)

    def hear(rank, value):
        if not rank and not isinstance(value, str):
            found[value[0]] = value[1]

    while left:
        given = database, left, most
        try:
            run_told(sweep_names, world_size, *given, timeout_s=timeout_s, on_told=hear)
        except Stuck as error:
            stuck = next(name for name in left if name not in found)
            found[stuck] = [Outcome(error.args[1], "hang", error.args[0])]
        left = [name for name in left if name not in found]
    return [result for results in found.values() for result in results]


def counted(outcomes):
    """How many of each kind there are."""
    counts = Counter(result.kind for result in outcomes)
    return {kind: counts[kind] for kind in OUTCOMES}
