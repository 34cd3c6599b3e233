"""Fixtures for tests of block programs: `harness` is the module tracing.py, `trace` its tracer."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def harness(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/kernels/tracing.py: `compute`, `count`, `tensors_of`, `Tracer`."""
    return load_module(Path(__file__).with_name("tracing.py"))


@pytest.fixture(scope="session")
def trace(harness: ModuleType) -> Iterator:
    """trace(kernel, problem, schedule, profile, arrays): runs and checks, gives the arrays."""
    tracer = harness.Tracer()
    yield tracer
    tracer.close()
