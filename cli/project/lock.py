"""`.torchshard/lock.json`: what was generated, from what, and the text as generated.

The text of each file is kept (compressed), so that an edit can always be told from a
change of the template, without git and without rendering an old template again.
This module reads the file and says what to write; `apply.py` writes.
"""

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .header import text_hash
from .layer import Layer

LOCK_PATH = ".torchshard/lock.json"
FORMAT = 1
_LAYER_FIELDS = (
    "class_name",
    "template",
    "options",
    "module",
    "package",
    "tests",
    "import_path",
)


@dataclass(frozen=True)
class LockedFile:
    """A file as it was generated.

    Attributes:
        text: Its text.
        packed: The text as the lock holds it. Kept as read: another zlib packs another way,
            and an unchanged file should not change the lock.
    """

    text: str
    packed: str

    @classmethod
    def of(cls, text: str) -> "LockedFile":
        """The file of that text."""
        packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
        return cls(text=text, packed=packed)

    @classmethod
    def from_json(cls, fields: Mapping[str, str]) -> "LockedFile":
        """The inverse of `to_json`."""
        text = zlib.decompress(base64.b85decode(fields["base"])).decode()
        if text_hash(text) != fields["sha256"]:
            raise ValueError("a base text does not match its sha256")
        return cls(text=text, packed=fields["base"])

    def to_json(self) -> dict[str, str]:
        """What the lock holds of it."""
        return {"base": self.packed, "sha256": text_hash(self.text)}


@dataclass(frozen=True)
class LockedLayer:
    """A layer that was generated, with its files by path relative to the root."""

    layer: Layer
    template_hash: str
    files: Mapping[str, LockedFile]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "LockedLayer":
        """The inverse of `to_json`."""
        return cls(
            layer=Layer(
                **{name: fields[name] for name in _LAYER_FIELDS},
                source=fields.get("source", ""),
                reading=fields.get("reading", {}),
            ),
            template_hash=fields["template_hash"],
            files={
                path: LockedFile.from_json(file)
                for path, file in fields["files"].items()
            },
        )

    def to_json(self) -> dict[str, Any]:
        """What the lock holds of it."""
        layer = {name: getattr(self.layer, name) for name in _LAYER_FIELDS}
        layer |= {"source": self.layer.source} if self.layer.source else {}
        layer |= {"reading": self.layer.reading} if self.layer.reading else {}
        files = {path: file.to_json() for path, file in self.files.items()}
        return {**layer, "template_hash": self.template_hash, "files": files}

    def with_texts(self, texts: Mapping[str, str]) -> "LockedLayer":
        """The same, where the files of `texts` have been generated anew."""
        files = dict(self.files)
        for path, text in texts.items():
            if path not in files or files[path].text != text:
                files[path] = LockedFile.of(text)
        return replace(self, files=files)


@dataclass(frozen=True)
class Lock:
    """All layers that were generated under one root, by `Layer.key`."""

    layers: Mapping[str, LockedLayer] = field(default_factory=dict)

    def owner(self, path: str) -> Layer | None:
        """The layer that the file at `path` was generated for."""
        for locked in self.layers.values():
            if path in locked.files:
                return locked.layer
        return None

    def with_layer(self, locked: LockedLayer) -> "Lock":
        """The same, with `locked` in place of an older entry of its key."""
        return Lock({**self.layers, locked.layer.key: locked})

    def without(self, key: str) -> "Lock":
        """The same, with no entry of that key."""
        layers = {name: layer for name, layer in self.layers.items() if name != key}
        return Lock(layers)

    def find(self, name: str) -> LockedLayer:
        """The layer that `name` means: its class, or its key where two share a class.

        Raises:
            UsageError: If it means none, or several.
        """
        if name in self.layers:
            return self.layers[name]
        found = [
            key for key, one in self.layers.items() if one.layer.class_name == name
        ]
        if len(found) == 1:
            return self.layers[found[0]]
        if found:
            raise UsageError(f"'{name}' means {' and '.join(found)}; name one of them")
        raise UsageError(
            f"no layer '{name}' in {LOCK_PATH}{self._nearest(name)}; "
            "`torchshard check` shows what was generated"
        )

    def short_name(self, layer: Layer) -> str:
        """The shortest name that `find` takes for `layer`."""
        same = [
            key
            for key, one in self.layers.items()
            if one.layer.class_name == layer.class_name
        ]
        return layer.class_name if same == [layer.key] else layer.key

    def _nearest(self, name: str) -> str:
        names = [one.layer.class_name for one in self.layers.values()]
        nearest = get_close_matches(name, names, 1)
        return f". Did you mean '{nearest[0]}'?" if nearest else ""

    def to_text(self) -> str:
        """The text of the lock file."""
        layers = {key: locked.to_json() for key, locked in self.layers.items()}
        fields = {"format": FORMAT, "layers": layers}
        return json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def read_lock(root: Path) -> Lock:
    """The lock of the project at `root`; an empty one where there is no file.

    Raises:
        UsageError: If the file is there and cannot be understood.
    """
    path = root / LOCK_PATH
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return Lock()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {LOCK_PATH}: {error}") from error
    try:
        fields = json.loads(text)
        if fields["format"] > FORMAT:
            raise UsageError(
                f"{LOCK_PATH} has format {fields['format']}, newer than this torchshard "
                f"knows ({FORMAT}); upgrade torchshard"
            )
        layers = fields["layers"].items()
        return Lock({key: LockedLayer.from_json(value) for key, value in layers})
    except UsageError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise UsageError(
            f"cannot read {LOCK_PATH}: {_in_words(error)}; "
            "restore it from version control, or delete it and generate again"
        ) from error


def _in_words(error: Exception) -> str:
    """Why a lock cannot be understood."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON, line {error.lineno}: {error.msg}"
    if isinstance(error, KeyError):
        return f"'{error.args[0]}' is missing"
    if isinstance(error, ValueError):
        return f"a text in it is damaged: {error}"
    return "it is not one that torchshard wrote"
