"""`twin`: the module twin.py, the slow models that the jitted caches are compared with."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def twin() -> ModuleType:
    """tests/memory/twin.py: `SectoredCache`, `ChipModel`, `Geometry`."""
    path = Path(__file__).with_name("twin.py")
    spec = importlib.util.spec_from_file_location("iosim_tests_memory_twin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
