"""Fixtures for tests of block programs: `harness` runs and checks them, `trace` traces them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def harness(load_module: Callable[[Path], ModuleType]) -> SimpleNamespace:
    """The names of tracing.py and examples.py beside this file."""
    modules = [load_module(Path(__file__).with_name(f"{n}.py")) for n in ("examples", "tracing")]
    return SimpleNamespace(**{name: value for m in modules for name, value in vars(m).items()})


@pytest.fixture(scope="session")
def trace(harness: SimpleNamespace) -> Iterator:
    """trace(kernel, problem, schedule, profile, arrays): runs and checks, gives the arrays."""
    tracer = harness.Tracer()
    yield tracer
    tracer.close()
