"""The merge of what the user and the template each made of a generated text.

Line by line, as diff3 does it: what one side changed is taken, what both changed in
different ways is left in the file between conflict markers, with the text of before. No
line of the user is ever dropped without a trace.
"""

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from ..project.header import split_header

YOURS = "yours"
BEFORE = "generated before"
NOW = "template now"
MARKERS = f"<<<<<<< {YOURS} / ||||||| {BEFORE} / ======= / >>>>>>> {NOW}"

_MARKER = re.compile(r"^(?:<{7}|\|{7}|>{7})(?: .*)?$", re.MULTILINE)
# Without this, a line that is frequent in a long file (an empty one) would match nothing,
# and more would be a conflict than is one.
_Matcher: Any = partial(SequenceMatcher, autojunk=False)


@dataclass(frozen=True)
class Merge:
    """A merged text.

    Attributes:
        text: The text, with conflict markers where `num_conflicts` is not 0. It ends in a
            newline.
        num_conflicts: How many places a person has to settle.
    """

    text: str
    num_conflicts: int


def merge_texts(base: str, yours: str, now: str) -> Merge:
    """What `yours` and `now` made of `base`, both kept.

    The header is the one of `now`: its hashes change with every template, which is no edit
    of anyone's. A header that the user took out or wrote around stays as the user left it.

    Args:
        base: The text as it was generated.
        yours: The text of the file, edited since.
        now: The text that the template gives now.
    """
    from merge3 import Merge3

    header, body = split_header(base)
    new_header, _ = split_header(now)
    if header and new_header:
        base = new_header + body
        yours = yours.replace(header, new_header, 1)
    before, mine, theirs = _lines(base), _lines(yours), _lines(now)
    merger = Merge3(before, mine, theirs, sequence_matcher=_Matcher)
    lines = merger.merge_lines(
        name_a=YOURS, name_base=BEFORE, name_b=NOW, base_marker="|||||||"
    )
    regions = [region[0] for region in merger.merge_regions()]
    return Merge("".join(lines), regions.count("conflict"))


def has_markers(text: str) -> bool:
    """Whether a conflict in `text` is still to be settled: ours, or one that git left."""
    return _MARKER.search(text) is not None


def _lines(text: str) -> list[str]:
    """The lines of `text`, each with its newline, the last one too.

    Split at newlines alone: `splitlines` would also split at a form feed, and a marker
    put after one would not begin a line.
    """
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    return [line if line.endswith("\n") else line + "\n" for line in lines]
