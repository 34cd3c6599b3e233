"""What all tests share: output as wide as where nobody watches, whatever runs them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables do not depend on the window in which the tests run."""
    monkeypatch.delenv("COLUMNS", raising=False)
