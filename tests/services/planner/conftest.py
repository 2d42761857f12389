"""A browser on the page of one planner, for all tests of the page; skipped where there is no browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.services.planner.serving import served

if TYPE_CHECKING:
    from tests.services.planner.browsing import Page


@pytest.fixture(scope="package")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("planner"), "--requests-per-second", "1000") as running:
        yield running.url


@pytest.fixture(scope="package")
def opened(url: str, downloads: Path) -> Iterator[Page]:
    from tests.services.planner.browsing import browsing

    with browsing(url, downloads) as page:
        page.open()
        page.browser.set_script_timeout(10)
        yield page


@pytest.fixture
def page(opened: Page) -> Page:
    """The page with a small request, planned; what an earlier test left is gone."""
    from tests.services.planner.browsing import SMALL

    opened.resize(1300)
    opened.open(request=SMALL)
    return opened
