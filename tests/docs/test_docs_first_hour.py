"""docs/first_hour.md holds what it shows, and the list of pages is whole."""

import re
from pathlib import Path

import pytest
from docs_page import DOCS, assert_shown, blocks

pytest_plugins = ["pytester"]
PAGE = "first_hour.md"
README = DOCS.parent / "README.md"


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_the_page_shows_what_the_commands_print(tmp_path: Path) -> None:
    """To the last count of lines, wrong layer and mended layer alike."""
    assert len(blocks(PAGE)) > 20
    assert_shown(PAGE, tmp_path)


def test_the_test_of_the_page_passes(pytester: pytest.Pytester) -> None:
    """With the layer that the page starts from."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / PAGE).read_text(), re.M | re.S
    )
    layer = "from layer_zoo import ParallelScaleShift as ParallelGate\n"
    pytester.makepyfile(my_layers=layer, test_page=code)
    pytester.runpytest_subprocess("--strict-markers").assert_outcomes(passed=2)


def test_every_page_is_listed() -> None:
    """In the README, the first hour first; and each link of every page leads somewhere."""
    listed = re.findall(r"\]\(docs/([\w.]+)\)", README.read_text("utf-8"))
    assert listed[0] == PAGE
    assert set(listed) == {path.name for path in DOCS.glob("*.md")}
    for page in (README, *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
