"""Every command of docs/templates.md prints what the page shows, in the page's order."""

from pathlib import Path

import pytest
from docs_page import assert_shown, blocks

PAGE = "templates.md"


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    """To the last count of lines; `...` stands for what differs between runs."""
    assert len(blocks(PAGE)) > 12
    assert_shown(PAGE, tmp_path)
