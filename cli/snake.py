"""The one Jinja extension that templates get: the filter `snake`."""

from jinja2 import Environment
from jinja2.ext import Extension

from .naming.names import snake_case


class SnakeExtension(Extension):
    """Add `{{ "ParallelLinear" | snake }}`, which is `parallel_linear`."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["snake"] = snake_case
