"""`twin`: the module twin.py, the slow models that the jitted caches are compared with."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def twin(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/memory/twin.py: `SectoredCache`, `ChipModel`, `Geometry`."""
    return load_module(Path(__file__).with_name("twin.py"))
