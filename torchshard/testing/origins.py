"""The files of the modules that a pickled call names, so that a rank loads the very same ones.

A name alone may not do: pytest's `--import-mode=importlib` loads test modules without putting
their folders on `sys.path`, and a name such as `tests` may be another package's.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

Origins: TypeAlias = "dict[str, tuple[str | None, list[str] | None]]"
"""Of a module by its name: its source file, and where a package's parts are."""


def origins_of(call: bytes) -> Origins:
    """Return where this process has the modules that the pickle `call` names, and their parents."""
    words = {word for _, word, _ in pickletools.genops(call) if isinstance(word, str)}
    found: Origins = {}
    for name in words & sys.modules.keys() - {"__main__"}:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path in sys.modules:
                found[path] = _origin(sys.modules[path], parts[:end], name)
    return {name: origin for name, origin in found.items() if any(origin)}


def _origin(
    module: ModuleType, parts: Sequence[str], asked: str
) -> tuple[str | None, list[str] | None]:
    file = getattr(module, "__file__", None)
    file = file if file is not None and file.endswith(".py") else None
    places = getattr(module, "__path__", None)
    if places is None and len(parts) <= asked.count("."):
        # pytest makes the parents of a test module up; it has parts, but no place.
        places = _place_above(sys.modules[asked], asked.count(".") + 1 - len(parts))
    return file, None if places is None else list(places)


def _place_above(module: ModuleType, steps: int) -> list[str]:
    file = getattr(module, "__file__", None)
    if file is None:
        return []
    folders = Path(file).parents
    return [str(folders[steps - 1 + (Path(file).name == "__init__.py")])]


class OriginFinder:
    """Finds modules where another process had them; the first of `sys.meta_path` in a rank."""

    def __init__(self, origins: Origins) -> None:
        self.origins: Mapping[str, tuple[str | None, list[str] | None]] = origins

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        """Return the spec of a module whose origin is known."""
        if name not in self.origins:
            return None
        file, places = self.origins[name]
        if file is not None:
            return spec_from_file_location(
                name, file, submodule_search_locations=places
            )
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = places
        return spec
