"""Where a template can be fetched from: a path or a URL, and how it is called after it."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ..errors import UnavailableError


def is_source(text: str) -> bool:
    """Whether `text` is a path or a URL and not the name of a template."""
    return any(mark in text for mark in "/\\:") or text.lower().endswith(".zip")


def local_path(source: str, root: Path) -> Path | None:
    """The file or folder that `source` means; None if it is to be fetched by a URL."""
    path = root / Path(source).expanduser()
    return path if path.exists() else None


def rooted_source(text: str, root: Path) -> str:
    """`text`, typed here, as it means the same in the project at `root`.

    A path counts from the root, so that the project can move.

    Raises:
        UnavailableError: If it is a path and nothing is there.
    """
    path = Path(text).expanduser()
    if path.exists():
        return _relative(path.resolve(), root)
    if ":" not in text:
        raise UnavailableError(
            f"no template at {text}; there is no such file or folder"
        )
    return text


def without_secret(source: str) -> str:
    """`source` without the password or token of a URL: a lock is there to be shared."""
    parts = urlsplit(source)
    if parts.scheme not in ("http", "https"):
        return source
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _relative(path: Path, root: Path) -> str:
    try:
        relative = Path(os.path.relpath(path, root)).as_posix()
    except ValueError:  # on another drive of Windows
        return path.as_posix()
    return relative if relative.startswith("..") else f"./{relative}"


def source_name(source: str) -> str:
    """What the template of `source` is called: the last word of its path."""
    last = re.split(r"[/\\:]", source.rstrip("/\\"))[-1]
    stem = re.sub(r"\.(git|zip)$", "", last, flags=re.IGNORECASE)
    name = re.sub("[^A-Za-z0-9_-]+", "-", stem).strip("-_")
    return name if name[:1].isalpha() else f"template-{name}".rstrip("-")
