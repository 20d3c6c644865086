"""A layer to generate: every fact that its files depend on, and nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from ..errors import UsageError

Value = bool | int | float | str


@dataclass(frozen=True)
class Layer:
    """One layer, its template, its options and where its files land.

    Attributes:
        class_name: Name of the class.
        template: Name of the template.
        options: Every option of the template, with its value.
        module: Name of the module's file, without `.py`.
        package: Folder of the module, a posix path relative to the project's root.
        tests: Folder of the test, likewise.
        import_path: What the test imports the class from, for example
            `layer_zoo.parallel_linear`.
        source: What the template was fetched from; empty for one found by its name.
        reading: What was read of a dense class, for the template that renders from that:
            plain JSON, kept in the lock, so that nothing is read twice.
    """

    class_name: str
    template: str
    options: Mapping[str, Value]
    module: str
    package: str
    tests: str
    import_path: str
    source: str = ""
    reading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what a lock edited by hand could smuggle into a path."""
        for name in (self.class_name, *self.import_path.split("."), self.module):
            if not name.isidentifier():
                raise UsageError(f"'{name}' is not an identifier")
        for folder in (self.package, self.tests):
            path = PurePosixPath(folder)
            if path.is_absolute() or ".." in path.parts or "\\" in folder:
                raise UsageError(f"'{folder}' leads out of the project")

    @property
    def key(self) -> str:
        """Name under which the lock keeps the layer: `layer_zoo.ParallelLinear`."""
        package = self.import_path.rpartition(".")[0]
        return f"{package}.{self.class_name}" if package else self.class_name

    @property
    def module_path(self) -> str:
        """Path of the module, relative to the project's root."""
        return str(PurePosixPath(self.package, f"{self.module}.py"))
