"""What was read of a dense class, as plain JSON from which the template `dense` renders.

The lock keeps it, so that neither `check` nor `update` imports a person's module.
"""

from __future__ import annotations
import __future__

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchshard as ts
from torch import nn

from ..errors import UsageError
from . import carry, products, text
from .choice import Chosen, choose, parsed_shards
from .constructor import Constructor, read_constructor
from .remarks import remarks
from .sample import Sample, find_samples
from .source import Method, carried_methods, free_names, imports_of
from .trial import Division, Rejected, make_believe_group, try_out

_OURS = {
    "Any": "from typing import Any",
    "Callable": "from collections.abc import Callable",
    "F": "import torch.nn.functional as F",
    "GroupLike": "from torchshard.distributed import GroupLike",
    "Tensor": "from torch import Tensor",
    "collectives": "from torchshard.distributed import collectives",
    "copy": "from torchshard.distributed import copy",
    "operator": "import operator",
    "reduce": "from torchshard.distributed import reduce",
    "torch": "import torch",
    "ts": "import torchshard as ts",
    "whole": "from torchshard.tensor import whole",
}
"""What the names in generated code mean."""


def read_dense(
    owner: type, module: str, shards: Sequence[str], arguments: str, inputs: str
) -> dict[str, Any]:
    """Read the class `owner`, which is imported from `module`.

    Args:
        owner: The class.
        module: Name of the module that the user named.
        shards: What `--shard` asks for, each `parameter=dim`.
        arguments: The constructor's arguments for a small one; empty to find some.
        inputs: Its inputs, likewise.

    Raises:
        UsageError: If it cannot be read, built or called; the text says what to do.
    """
    _expect_dense(owner)
    asked = parsed_shards(shards)
    constructor = read_constructor(owner)
    with _one_thread():
        return _read(owner, module, constructor, asked, (arguments, inputs))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute without threads, which cost more than small tensors take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read(
    owner: type[nn.Module],
    module: str,
    constructor: Constructor,
    asked: dict[str, int | None],
    given: tuple[str, str],
) -> dict[str, Any]:
    samples = find_samples(owner, *given)
    if not any(True for _ in samples[0].build(owner).parameters()):
        raise UsageError(
            f"{owner.__name__} has no parameters, so there is nothing to divide; it takes"
            " shards as it is, as far as torchshard has rules for what it calls"
        )
    methods, problem = _methods(owner)
    chosen = None
    if methods:
        try:
            chosen = _chosen(owner, methods, samples, asked)
        except Rejected as error:
            methods, problem = [], f"carried over, it does not run: {error}"
    return _as_json(
        owner, module, constructor, samples, methods, chosen, problem, asked
    )


def _expect_dense(owner: type) -> None:
    if not issubclass(owner, nn.Module):
        raise UsageError(f"{owner.__name__} is not a subclass of torch.nn.Module")
    if issubclass(owner, ts.ParallelLayer):
        raise UsageError(f"{owner.__name__} is a sharded layer already")
    if issubclass(owner, nn.modules.lazy.LazyModuleMixin):
        raise UsageError(
            f"{owner.__name__} is lazy: its shapes are not known before it has run. Name the"
            " class that it becomes"
        )
    if owner.forward is nn.Module.forward:
        raise UsageError(f"{owner.__name__} has no forward to carry over")


def _methods(owner: type) -> tuple[list[Method], str]:
    """The methods to carry over; none, and why, if that cannot be done."""
    try:
        methods = carried_methods(owner, ts.ParallelLayer)
        for method in methods:
            _expect_carriable(method)
    except UsageError as error:
        return [], str(error)
    return methods, ""


def _expect_carriable(method: Method) -> None:
    names = {node.id for node in ast.walk(method.tree) if isinstance(node, ast.Name)}
    if "super" in names or "__class__" in names:
        raise UsageError(
            f"{method.name} calls super(), whose code does not know of shards; write out"
            " what it does"
        )
    bound = {
        node.id
        for node in ast.walk(method.tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    taken = bound & (set(_OURS) | set(_PRODUCTS))
    if taken:
        raise UsageError(
            f"{method.name} has a variable '{min(taken)}', which generated code uses for"
            " something else; give it another name"
        )
    clashes = {
        name
        for name in method.own_reads - {"training"}
        if hasattr(ts.ParallelLayer, name)
    } - set(dir(nn.Module))
    if clashes:
        raise UsageError(
            f"{method.name} reads self.{min(clashes)}, a name that ParallelLayer uses for"
            " something else; give it another name"
        )


_OPAQUE = ("parameters", "named_parameters", "state_dict", "_parameters", "__dict__")


def _reads_all(methods: Iterable[Method]) -> bool:
    """Whether the code looks at the parameters of its own otherwise than by their names."""
    for method in methods:
        first = method.first_argument
        dotted = set()
        for node in ast.walk(method.tree):
            if isinstance(node, ast.Attribute):
                dotted.add(id(node.value))
                if node.attr in _OPAQUE:
                    return True
        for node in ast.walk(method.tree):
            is_self = isinstance(node, ast.Name) and node.id == first
            if is_self and id(node) not in dotted:
                return True
    return False


def _chosen(
    owner: type[nn.Module],
    methods: Sequence[Method],
    samples: Sequence[Sample],
    asked: dict[str, int | None],
) -> Chosen:
    module = samples[0].build(owner)
    with make_believe_group() as group:
        undivided = try_out(owner, methods, samples, Division(), group)
        return choose(
            module,
            asked,
            not _reads_all(methods),
            lambda division: try_out(
                owner, methods, samples, division, group, undivided.shapes
            ),
        )


def _as_json(
    owner: type[nn.Module],
    module: str,
    constructor: Constructor,
    samples: Sequence[Sample],
    methods: Sequence[Method],
    chosen: Chosen | None,
    problem: str,
    asked: dict[str, int | None],
) -> dict[str, Any]:
    modules = [sample.build(owner) for sample in samples]
    parameters = chosen.division.parameters if chosen else _first_dims(modules[0])
    shards = [
        _shard(name, dim, modules, constructor, samples[0])
        for name, dim in parameters.items()
    ]
    texts = (
        [_method_text(one, chosen, shards) for one in methods]
        if chosen
        else [text.stub(owner.__name__, problem)]
    )
    used = _used_products("\n".join(texts))
    left = remarks(samples[0], modules[0], methods, chosen, problem)
    imports = list(
        _imports(owner, module, constructor, methods, texts, used, bool(shards))
    )
    optional = [one for one in shards if one["is_optional"]]
    typical = next((one["name"] for one in shards if one not in optional), "")
    return {
        "attributes": _attributes(modules, methods, parameters),
        "axes": list(_axes(shards)),
        "build": text.fitted(f"dense = {owner.__name__}(", constructor.call, ")", 8),
        "cases": [text.case(owner.__name__, sample) for sample in samples],
        "dense": owner.__name__,
        "divided": _divided(chosen),
        "held": list(_held(modules[0], chosen, parameters)) or ["nothing: it has none"],
        "imports": text.import_blocks(imports, _is_local),
        "inputs": sorted(
            {type(x).__name__ for one in samples for x in one.inputs if _is_drawn(x)}
        ),
        "is_local": _is_local(module),
        "left": text.wrapped(left),
        "methods": texts,
        "module": module,
        "products": text.sources(products, used),
        "remarks": left,
        "rule": "as asked for"
        if asked
        else "by rule: as much as possible\n    is computed with in shards, and of the ways to do so the one with the fewest\n    collectives is taken",
        "shards": shards,
        "signature": text.fitted(
            "def __init__(", ["self", *constructor.parameters], ") -> None:", 4
        ),
        "typical": typical or "weight",
    }


def _divided(chosen: Chosen | None) -> str:
    """The call that divides the layers of torch.nn inside."""
    if chosen is None or not chosen.division.modules:
        return ""
    plan = [f'"{path}": "{split}"' for path, split in chosen.division.modules.items()]
    line = f"ts.parallelize(dense, {{{', '.join(plan)}}}, group=self.group)"
    if len(line) + 8 <= text.WIDTH:
        return f"        {line}"
    middle = f"            dense, {{{', '.join(plan)}}}, group=self.group"
    if len(middle) <= text.WIDTH:
        return f"        ts.parallelize(\n{middle}\n        )"
    rows = "".join(f"                {one},\n" for one in plan)
    return (
        "        ts.parallelize(\n            dense,\n            {\n"
        f"{rows}            }},\n            group=self.group,\n        )"
    )


def _axes(shards: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each axis once, with a parameter that tells its size; one that is always there."""
    names = list(dict.fromkeys(one["axis"] for one in shards))
    for name in names:
        holders = [one for one in shards if one["axis"] == name]
        holder = min(holders, key=lambda one: one["is_optional"])
        yield {"name": name, "of": holder["name"], "dim": holder["dim"]}


def _is_drawn(value: Any) -> bool:
    return type(value).__name__ in ("Floats", "Integers")


def _is_local(module: str) -> bool:
    """Whether a module belongs to the project and not to what is installed."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("torch", "torchshard"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" not in Path(file).parts


def _first_dims(module: nn.Module) -> dict[str, int]:
    """For a layer without a forward yet: dim 0 of every parameter of its own."""
    named = module.named_parameters(recurse=False)
    return {name: 0 for name, parameter in named if parameter.dim()}


def _shard(
    name: str,
    dim: int,
    modules: Sequence[nn.Module],
    constructor: Constructor,
    sample: Sample,
) -> dict[str, Any]:
    tensors = [getattr(module, name, None) for module in modules]
    size = tensors[0].shape[dim] if tensors[0] is not None else 0
    return {
        "name": name,
        "dim": dim,
        "axis": constructor.name_of(size, sample) or f"{name}_{dim}",
        "is_optional": any(tensor is None for tensor in tensors),
        "is_frozen": any(one is not None and not one.requires_grad for one in tensors),
    }


def _method_text(
    method: Method, chosen: Chosen, shards: Sequence[dict[str, Any]]
) -> str:
    """A method as it is carried over, formatted where ruff is installed."""
    reads = [one for one in shards if one["name"] in method.own_reads]
    changes = chosen.outcome.changes[method.name]
    changed = carry.changed(method, changes, [one["name"] for one in reads])
    lines = [
        text.own_shard(carry.local_name(method, one["name"]), one) for one in reads
    ]
    return text.method(changed, lines)


def _used_products(code: str) -> list[str]:
    """The functions of `products` that `code` calls, and those that they call."""
    found: set[str] = set()
    waiting = [name for name in _PRODUCTS if f"{name}(" in code]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            names = free_names(ast.parse(text.sources(products, [name])))
            waiting += [other for other in _PRODUCTS if other in names]
    return [name for name in _PRODUCTS if name in found]


_PRODUCTS = ("on_shards", "summed", "row_linear", "lookup", "embedding", "_own")


def _imports(
    owner: type,
    module: str,
    constructor: Constructor,
    methods: Sequence[Method],
    texts: Sequence[str],
    used: Sequence[str],
    has_shards: bool,
) -> Iterator[str]:
    """Every import of the generated module, a name to a line."""
    names = _free_in_functions([*texts, text.sources(products, used)]) - set(_PRODUCTS)
    theirs: set[str] = set()
    lines: set[str] = set()
    for method in methods:
        if method.module:
            own = (free_names(method.tree) & names) - {owner.__name__}
            lines |= set(imports_of(own, method.module))
            theirs |= own
    lines |= set(imports_of(constructor.names - {owner.__name__}, constructor.module))
    if _postpones_annotations(owner):
        lines.add("from __future__ import annotations")
    needed = (names - theirs) | ({"Tensor"} if has_shards else set())
    for name in needed | {"ts", "GroupLike", "collectives"}:
        if name in _OURS:
            lines.add(_OURS[name])
    lines.add(f"from {module} import {owner.__name__}")
    meanings: dict[str, str] = {}
    for line in sorted(lines):
        name = line.split()[-1]
        if meanings.setdefault(name, line) != line:
            raise UsageError(
                f"'{name}' would have two meanings in the generated file: {meanings[name]},"
                f" and {line}. Rename it in {owner.__name__}"
            )
    yield from sorted(lines)


def _free_in_functions(codes: Iterable[str]) -> set[str]:
    """The names that the functions in some pieces of code take from outside."""
    found: set[str] = set()
    for code in codes:
        for node in ast.parse(textwrap.dedent(code)).body:
            found |= free_names(node)
    return found


def _postpones_annotations(owner: type) -> bool:
    return (
        getattr(sys.modules[owner.__module__], "annotations", None)
        is __future__.annotations
    )


def _taken_over(name: str) -> str:
    if name.isidentifier():
        return f"self.{name} = dense.{name}"
    return f'self.add_module("{name}", dense.get_submodule("{name}"))'


def _attributes(
    modules: Sequence[nn.Module], methods: Sequence[Method], shards: Iterable[str]
) -> list[str]:
    """The lines that take over what the dense module holds, apart from the shards."""
    module = modules[0]
    kept = [*module._modules, *module._parameters]
    lines = [_taken_over(name) for name in kept if name not in shards]
    for name in module._buffers:
        is_kept = name not in module._non_persistent_buffers_set
        options = "" if is_kept else ", persistent=False"
        lines.append(f'self.register_buffer("{name}", dense.{name}{options})')
    held = {*module._modules, *module._parameters, *module._buffers}
    reads = {name for method in methods for name in method.own_reads}
    carried = {method.name for method in methods}
    for name in sorted(reads - held - carried):
        is_ours = hasattr(nn.Module, name) or name in ("training", "forward")
        if hasattr(module, name) and not is_ours:
            lines.append(f"self.{name} = dense.{name}")
    return lines


def _held(
    module: nn.Module, chosen: Chosen | None, parameters: Mapping[str, int]
) -> Iterator[str]:
    """What each rank holds of every parameter, a line to each."""
    divided = chosen.division.modules if chosen else {}
    rows = []
    for name, parameter in module.named_parameters():
        path = next((one for one in divided if name.startswith(f"{one}.")), None)
        how = "whole"
        if name in parameters:
            how = f"a part of dim {parameters[name]}"
        elif path is not None:
            how = f"as a layer divided by {divided[path]}"
        if chosen and name in chosen.outcome.gathered:
            how += ", gathered where it is used"
        if name not in parameters and path is None and not parameter.requires_grad:
            how += ", frozen"
        rows.append((name, how))
    width = max((len(name) for name, _ in rows), default=0)
    for name, how in rows:
        yield f"{name:{width}}  {how}"
