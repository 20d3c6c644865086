"""From the words of `torchshard new-layer` to a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError
from .layer import Layer, Value
from .lock import Lock, read_lock
from .names import check_class_name, check_module_name, snake_case
from .plan import Plan, make_plan
from .target import Target, find_target
from .template import infer_template, load_template


@dataclass(frozen=True)
class Request:
    """What was asked for.

    Attributes:
        class_name: Name of the class.
        templates_root: Folder of the templates.
        template: Name of the template; None to reuse the recorded one, or to infer it.
        settings: Options, each `key=value`.
        into: Folder for the layer.
        module: Name of the module; None to derive it from the class.
        allow_shadow: Whether the class may hide one of torch.nn or a builtin.
    """

    class_name: str
    templates_root: Path
    template: str | None = None
    settings: Sequence[str] = ()
    into: Path = Path()
    module: str | None = None
    allow_shadow: bool = False


def plan_new_layer(request: Request) -> Plan:
    """The plan for `request`.

    A layer that is in the lock keeps its template, its module and the options that are not
    set again.

    Raises:
        UsageError: If a name, an option or the folder cannot be used.
        TemplateError: If the template does not render.
    """
    check_class_name(request.class_name, allow_shadow=request.allow_shadow)
    target = find_target(request.into)
    recorded = _recorded(request.class_name, target, read_lock(target.root))
    name, options = _template_and_options(request, recorded)
    module = _module(request, target, recorded)
    layer = Layer(
        class_name=request.class_name,
        template=name,
        options=options,
        module=module,
        package=target.package,
        tests=recorded.tests if recorded else target.tests,
        import_path=target.import_path(module),
    )
    return make_plan(target.root, layer, request.templates_root)


def _recorded(class_name: str, target: Target, lock: Lock) -> Layer | None:
    prefix = f"{target.import_prefix}." if target.in_package else ""
    locked = lock.layers.get(f"{prefix}{class_name}")
    return locked.layer if locked else None


def _template_and_options(
    request: Request, recorded: Layer | None
) -> tuple[str, dict[str, Value]]:
    """The template, and its options as recorded where they are not set again."""
    root = request.templates_root
    if request.template:
        template = load_template(root, request.template)
    elif recorded:
        template = load_template(root, recorded.template)
    else:
        template = infer_template(root, request.class_name)
    is_same = recorded is not None and recorded.template == template.name
    before = recorded.options if recorded is not None and is_same else {}
    return template.name, {**before, **template.parse_options(request.settings)}


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
