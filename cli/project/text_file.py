"""A text file as it is on disk: its text, its line ends, and whether it is text at all."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError


@dataclass(frozen=True)
class TextFile:
    r"""A file that was read.

    Attributes:
        text: Its text, with `\n` alone between lines. Bytes that are not UTF-8 are marks in
            it, so such a file never equals a generated one.
        newline: The line end that most of its lines have, which is kept when it is written.
        is_utf8: Whether `text` is all that it holds.
    """

    text: str
    newline: str
    is_utf8: bool


def read_file(path: Path) -> TextFile | None:
    """The file at `path`; None if there is none.

    Raises:
        UsageError: If it cannot be read.
    """
    content = _read_bytes(path)
    if content is None:
        return None
    num_crlf = content.count(b"\r\n")
    is_mostly_crlf = num_crlf > content.count(b"\n") - num_crlf
    text = content.decode(errors="replace").replace("\r\n", "\n")
    newline = "\r\n" if is_mostly_crlf else "\n"
    return TextFile(text, newline, _is_utf8(content))


def read_text(path: Path, *, keep_newlines: bool = False) -> str | None:
    """The text of a file; None if there is none.

    Raises:
        UsageError: If it cannot be read, or if it has to be kept as it is and is not UTF-8.
    """
    if not keep_newlines:
        file = read_file(path)
        return file.text if file else None
    content = _read_bytes(path)
    try:
        return content.decode() if content is not None else None
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _read_bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
