"""Products: linear, matmul and its kin, einsum, bilinear, cdist.

What is summed over and divided is summed over the ranks, in one all-reduce; a bias, or what
else is added, is added once after it. Every other divided dim is one of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchshard.distributed import ops
from torchshard.tensor.operands import Division, Labels, division, part
from torchshard.tensor.sharded import bound, local_call, rule


def product(
    name: str,
    compute: Callable[..., Tensor],
    factors: Sequence[Tensor],
    labels: Sequence[Labels],
    output: Labels,
    *,
    addend: Tensor | None = None,
    scale: float = 1,
    broadcasts: bool = False,
    check: Callable[[Division], None] = lambda divided: None,
) -> Tensor:
    """Return a product of factors whose dims are labelled, plus what is added to it.

    Args:
        name: The operation, for errors.
        compute: Takes this rank's factors, and the addend if there is one.
        factors: Divided or plain.
        labels: Of the dims of each factor; what `output` lacks is summed over.
        output: The labels of the result's dims. Those of the addend are the last of them.
        addend: Added to the product; it may broadcast.
        scale: What the addend is multiplied by.
        broadcasts: Whether factors of size 1 stand for any size.
        check: Raises if the operation cannot be divided so.

    Raises:
        ShardedOpError: If operands are divided in different ways, or `check` says so.
        ShapeError: If a plain operand does not have the whole size.
    """
    ends = output[len(output) - addend.dim() :] if addend is not None else ()
    divided = division(name, (*factors, addend), (*labels, ends))
    check(divided)
    is_local = divided.place(output) is not None
    if not is_local:
        divided.expect_once(name)
    own = [
        part(name, factor, its, divided, broadcasts=broadcasts)
        for factor, its in zip(factors, labels, strict=True)
    ]
    if is_local:
        if addend is not None:
            own.append(part(name, addend, ends, divided, broadcasts=True))
        return divided.marked(local_call(compute, tuple(own), {}), output)
    result = ops.reduce(local_call(compute, tuple(own), {}), divided.sharding.group)
    if addend is None or not scale:
        return result
    # Autocast has rounded the product already; what is added does not widen it.
    addend = addend.to(result.dtype).expand(result.shape)
    return result + (addend if scale == 1 else addend * scale)


@rule(["linear"])
def _linear(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    x, weight, bias = bound(args, kwargs, input=None, weight=None, bias=None)
    batch = tuple(range(x.dim() - 1))
    out = ("out",) * (weight.dim() - 1)
    labels = ((*batch, "in"), (*out, "in"))
    return product("linear", func, (x, weight), labels, (*batch, *out), addend=bias)


@rule(
    [
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "mv",
        "dot",
        "vdot",
        "linalg_matmul",
    ]
)
def _matmul(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    name = func.__name__
    left, right = (*args, *kwargs.values())
    if name == "__rmatmul__":
        left, right, func = right, left, torch.matmul
    rows, columns, output = _matrix_labels(left.dim(), right.dim())
    broadcasts = name not in ("mm", "bmm", "mv", "dot", "vdot")
    factors, labels = (left, right), (rows, columns)
    return product(name, func, factors, labels, output, broadcasts=broadcasts)


def _matrix_labels(num_left: int, num_right: int) -> tuple[Labels, Labels, Labels]:
    """Return the labels of two factors and their product; batch dims count from the back."""
    lefts, rights = tuple(range(2 - num_left, 0)), tuple(range(2 - num_right, 0))
    row = ("row",) if num_left > 1 else ()
    column = ("column",) if num_right > 1 else ()
    batch = max(lefts, rights, key=len)
    return (*lefts, *row, "sum"), (*rights, "sum", *column), (*batch, *row, *column)


@rule(["outer", "ger"])
def _outer(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    factors = (*args, *kwargs.values())
    labels = ("row",), ("column",)
    return product("outer", func, factors, labels, ("row", "column"))


_ADDED = {
    "addmm": ("rs", "sc", "rc"),
    "addmv": ("rs", "s", "r"),
    "addr": ("r", "c", "rc"),
    "addbmm": ("brs", "bsc", "rc"),
    "baddbmm": ("brs", "bsc", "brc"),
}
"""Labels of the factors and of the result: b batch, r row, c column, s summed over."""


@rule(_ADDED)
def _added(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Beta * input + alpha * product of two factors."""
    named = dict(kwargs)
    alpha, beta = named.pop("alpha", 1), named.pop("beta", 1)
    addend, left, right = (*args, *named.values())
    *labels, output = _ADDED[func.__name__]

    def compute(left: Tensor, right: Tensor, *added: Tensor) -> Any:
        if added:
            return func(*added, left, right, beta=beta, alpha=alpha)
        return func(left.new_zeros(()), left, right, beta=0, alpha=alpha)

    return product(
        func.__name__,
        compute,
        (left, right),
        [tuple(its) for its in labels],
        tuple(output),
        addend=addend,
        scale=beta,
    )


@rule(["bilinear"])
def _bilinear(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    names = {"input1": None, "input2": None, "weight": None, "bias": None}
    first, second, weight, bias = bound(args, kwargs, **names)
    batch = tuple(range(first.dim() - 1))
    labels = ((*batch, "in1"), (*batch, "in2"), ("out", "in1", "in2"))

    def check(divided: Division) -> None:
        if divided.label in ("in1", "in2"):  # torch 2.13 cannot shape a part of none
            divided.expect_some("bilinear")

    return product(
        "bilinear",
        func,
        (first, second, weight),
        labels,
        (*batch, "out"),
        addend=bias,
        check=check,
    )


@rule(["cdist"])
def _cdist(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Distances of all pairs of rows; the features that a distance sums over are whole."""
    # The dispatch calls `x2` what NumPy means by it.
    names = {"x1": None, "other": None, "p": 2.0, "compute_mode": _MODE}
    first, second, *rest = bound(args, kwargs, **names)
    left, right = (tuple(range(2 - x.dim(), 0)) for x in (first, second))
    labels = ((*left, "row", "in"), (*right, "column", "in"))
    output = (*max(left, right, key=len), "row", "column")
    return product(
        "cdist",
        lambda *own: func(*own, *rest),
        (first, second),
        labels,
        output,
        broadcasts=True,
        check=lambda divided: divided.expect_not("cdist", _DISTANCE),
    )


_DISTANCE: dict[Hashable, str] = {"in": "takes the distance over it"}
_MODE = "use_mm_for_euclid_dist_if_necessary"


@rule(["tensordot"])
def _tensordot(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    left, right, dims = bound(args, kwargs, a=None, b=None, dims=2)
    if isinstance(dims, int):
        pairs = list(zip(range(-dims, 0), range(dims), strict=True))
    else:
        pairs = list(zip(*dims, strict=True))
    rows: list[Hashable] = [("left", dim) for dim in range(left.dim())]
    columns: list[Hashable] = [("right", dim) for dim in range(right.dim())]
    for first, second in pairs:
        rows[first] = columns[second] = ("sum", int(first) % left.dim())
    output = tuple(label for label in (*rows, *columns) if label[0] != "sum")  # type: ignore[index]
    labels = (tuple(rows), tuple(columns))
    return product(
        "tensordot", lambda *own: func(*own, dims=dims), (left, right), labels, output
    )


@rule(["einsum"])
def _einsum(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    equation, *factors = args
    if len(factors) == 1 and isinstance(factors[0], list | tuple):
        factors = list(factors[0])
    terms, arrow, result = equation.replace(" ", "").partition("->")
    labels = [
        _letters(term, factor.dim())
        for term, factor in zip(terms.split(","), factors, strict=True)
    ]
    num_dots = max([len([label for label in its if _is_dots(label)]) for its in labels])
    if not arrow:
        counted = Counter(terms.replace(",", "").replace(".", ""))
        result = "..." + "".join(sorted(c for c, n in counted.items() if n == 1))
    output = _letters(
        result, len(result.replace("...", "")) + num_dots * ("..." in result)
    )
    return product(
        "einsum",
        lambda *own: func(equation, *own),
        factors,
        labels,
        output,
        broadcasts=True,
    )


def _is_dots(label: Hashable) -> bool:
    return isinstance(label, int)


def _letters(term: str, num_dims: int) -> Labels:
    """Return the labels of a term: its letters, and for `...` numbers from the back."""
    before, dots, behind = term.partition("...")
    num_dots = num_dims - len(before) - len(behind)
    return (*before, *range(-num_dots, 0), *behind) if dots else tuple(term)
