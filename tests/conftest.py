"""What all tests share: output as wide as where nobody watches, whatever runs them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], ModuleType]:
    """Loads a module of helpers by its path; folders of tests are no packages."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"iosim_tests_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(autouse=True)
def no_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables do not depend on the window in which the tests run."""
    monkeypatch.delenv("COLUMNS", raising=False)
