"""One browser a module, and no page of one test in the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.pages import chromium


@pytest.fixture(scope="module")
def _browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture
def browser(_browser: Any) -> Iterator[Any]:
    """Chromium; every page that the test opens is closed after it."""
    yield _browser
    for context in _browser.contexts:
        context.close()
