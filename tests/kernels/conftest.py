"""Fixtures for tests of block programs: `harness` is the module tracing.py, `trace` its tracer."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def harness() -> ModuleType:
    """tests/kernels/tracing.py: `compute`, `count`, `tensors_of`, `Tracer`."""
    path = Path(__file__).with_name("tracing.py")
    spec = importlib.util.spec_from_file_location("iosim_tests_tracing", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def trace(harness: ModuleType) -> Iterator:
    """trace(kernel, problem, schedule, profile, arrays): runs and checks, gives the arrays."""
    tracer = harness.Tracer()
    yield tracer
    tracer.close()
