"""A memory-hierarchy simulator for IO-aware attention kernels on GPUs and TPUs.

    from iosim import Attention, Schedule, load_profile, simulate
    result = simulate("flash2", Attention(seqlen=4096), load_profile("…"), Schedule(tile=(128, 64)))
    result.traffic.dram_read_bytes

Names are loaded when first used: importing the package is cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iosim.errors import IosimError
    from iosim.kernels import kernel_names, load_kernel
    from iosim.memory.cache import Cache
    from iosim.problem import Attention, Gemm, Rows, Schedule, Stream
    from iosim.problem_variants import BlockSparse, Decode, LatentDecode, PagedDecode
    from iosim.profiles import load_profile, profile_names
    from iosim.result import Result
    from iosim.simulation import simulate
    from iosim.validation.compare import validate

__version__ = "0.1.0"

_HOMES = {
    "Attention": "problem",
    "BlockSparse": "problem_variants",
    "Cache": "memory.cache",
    "Decode": "problem_variants",
    "Gemm": "problem",
    "IosimError": "errors",
    "LatentDecode": "problem_variants",
    "PagedDecode": "problem_variants",
    "Result": "result",
    "Rows": "problem",
    "Schedule": "problem",
    "Stream": "problem",
    "kernel_names": "kernels",
    "load_kernel": "kernels",
    "load_profile": "profiles",
    "profile_names": "profiles",
    "simulate": "simulation",
    "validate": "validation.compare",
}

__all__ = [
    "Attention",
    "BlockSparse",
    "Cache",
    "Decode",
    "Gemm",
    "IosimError",
    "LatentDecode",
    "PagedDecode",
    "Result",
    "Rows",
    "Schedule",
    "Stream",
    "__version__",
    "kernel_names",
    "load_kernel",
    "load_profile",
    "profile_names",
    "simulate",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'iosim' has no attribute {name!r}")
    return getattr(import_module(f"iosim.{_HOMES[name]}"), name)
