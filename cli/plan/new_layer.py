"""From the words of `torchshard new-layer` to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import UsageError
from ..naming.names import check_class_name, check_module_name, snake_case
from ..project.collisions import check_collisions
from ..project.header import read_header
from ..project.layer import Layer, Value
from ..project.lock import Lock, read_lock
from ..project.target import Target, find_target, inside
from ..project.text_file import read_text
from ..template.catalogue import Catalogue
from ..template.template import Template
from .from_dense import TEMPLATE as DENSE
from .from_dense import Dense, find_dense, found_again
from .plan import Plan, make_plan


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        class_name: Name of the class.
        templates: The templates.
        template: Name of the template, or a path or URL to fetch it from; None to reuse
            the recorded one, or to infer it.
        settings: Options, each `key=value`.
        into: Folder for the layer.
        module: Name of the module; None to derive it from the class.
        allow_shadow: Whether the class may hide one of torch.nn or a builtin.
        dense: A dense class to read, as `MODULE:CLASS`.
        shards: What to divide of it, each `parameter=dim`.
    """

    class_name: str
    templates: Catalogue
    template: str | None = None
    settings: Sequence[str] = ()
    into: Path = Path()
    module: str | None = None
    allow_shadow: bool = False
    dense: str | None = None
    shards: Sequence[str] = ()


def plan_new_layer(request: Request) -> Plan:
    """The plan for `request`.

    A layer that is in the lock keeps its template, its module and the options that are not
    set again. Where the lock is lost, the header of its file says what they were.

    Raises:
        UsageError: If a name, an option or the folder cannot be used.
        TemplateError: If the template does not render.
        UntrustedError: If it is not bundled, and nobody said that it may run.
    """
    start = find_start(request)
    plan = make_plan(start.target.root, start.layer, start.templates)
    generated = {e.path: e.generated for e in plan.entries if e.generated is not None}
    check_collisions(plan.layer, generated)
    return replace(plan, reason=start.reason)


@dataclass(frozen=True)
class Start:
    """What a request means, before anything is rendered.

    Attributes:
        target: Where the layer lands.
        layer: The layer, with the options that are recorded or set.
        template: Its template.
        templates: The templates that its project has.
        reason: How the template was found; empty if it was named.
    """

    target: Target
    layer: Layer
    template: Template
    templates: Catalogue
    reason: str


def find_start(request: Request) -> Start:
    """What `request` means.

    Raises:
        UsageError: If a name, an option or the folder cannot be used.
        TemplateError: If the template cannot be read.
        UntrustedError: If it would be fetched, and nobody said that it may run.
    """
    check_class_name(request.class_name, allow_shadow=request.allow_shadow)
    target = find_target(request.into)
    locked = _recorded(request.class_name, target, read_lock(target.root))
    layer = _placed(request, target, locked)
    recorded = locked or _from_header(layer, target)
    templates = request.templates.in_project(target.root)
    dense = _dense(request, recorded, templates)
    if dense:
        request = replace(request, template=dense.template, settings=dense.settings)
    template = _template(request, recorded, templates)
    layer = replace(
        layer,
        template=template.name,
        source=template.source,
        options=_options(request, recorded, template),
        reading=dense.reading if dense else {},
    )
    reason = dense.reason if dense else _reason(request, locked, recorded)
    return Start(target, layer, template, templates, reason)


def _placed(request: Request, target: Target, locked: Layer | None) -> Layer:
    """The layer of `request` in its place, its template still open."""
    module = _module(request, target, locked)
    return Layer(
        class_name=request.class_name,
        template=request.template or "",
        options={},
        module=module,
        package=target.package,
        tests=locked.tests if locked else target.tests,
        import_path=target.import_path(module),
    )


def _dense(
    request: Request, recorded: Layer | None, templates: Catalogue
) -> Dense | None:
    """What the layer is rendered from, if that is the reading of a dense class."""
    if request.dense:
        found = find_dense(request.dense, request.shards, request.settings, templates)
        if request.template not in (None, found.template):
            raise UsageError(
                f"--from {request.dense} goes with the template '{found.template}';"
                f" leave out -t {request.template}"
            )
        return found
    name = request.template or (recorded.template if recorded else "")
    if name == DENSE:
        return found_again(recorded, request.shards, request.settings, templates)
    if request.shards:
        raise UsageError(
            "--shard divides what --from MODULE:CLASS reads; give that too"
        )
    return None


def _reason(request: Request, locked: Layer | None, recorded: Layer | None) -> str:
    """How the template was found; empty if it was named."""
    if request.template:
        return ""
    if locked:
        return "as recorded"
    return "as recorded in the file" if recorded else "inferred from the name"


def _from_header(layer: Layer, target: Target) -> Layer | None:
    """`layer` as the file in its place says that it was generated."""
    text = read_text(inside(target.root, layer.module_path))
    header = read_header(text) if text is not None else None
    if header is None or header.class_name != layer.class_name:
        return None
    return replace(layer, template=header.template, options=header.options)


def _recorded(class_name: str, target: Target, lock: Lock) -> Layer | None:
    prefix = f"{target.import_prefix}." if target.in_package else ""
    locked = lock.layers.get(f"{prefix}{class_name}")
    return locked.layer if locked else None


def _template(
    request: Request, recorded: Layer | None, templates: Catalogue
) -> Template:
    if request.template:
        return templates.pick(request.template)
    if recorded:
        return templates.load(recorded.template, recorded.source)
    return templates.infer(request.class_name)


def _options(
    request: Request, recorded: Layer | None, template: Template
) -> dict[str, Value]:
    """The options as recorded where they are not set again."""
    is_same = recorded is not None and recorded.template == template.name
    before = recorded.options if recorded is not None and is_same else {}
    return {**before, **template.parse_options(request.settings)}


def _module(request: Request, target: Target, recorded: Layer | None) -> str:
    if recorded and request.module in (None, recorded.module):
        return recorded.module
    if recorded:
        raise UsageError(
            f"{request.class_name} is already in {recorded.module_path}; "
            f"leave out --module, or choose another class name"
        )
    module = request.module or snake_case(request.class_name)
    check_module_name(module, target.folder, in_package=target.in_package)
    return module
