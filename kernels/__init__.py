"""The algorithms, one per file: a jitted block program that computes and counts, closed forms.

`kernel_names()` lists them without importing one; `load_kernel(name)` imports the one asked for.
"""

from __future__ import annotations

from importlib import import_module

from iosim.errors import unknown_name
from iosim.launch import Kernel

_MODULES = {
    "standard": "standard",
    "flash1": "flash1",
    "flash2": "flash2",
    "flash3": "flash3",
    "flash2-bwd": "flash2_bwd",
    "flash-decode": "flash_decode",
    "paged-decode": "paged_decode",
    "mla-decode": "mla_decode",
    "block-sparse": "block_sparse",
    "gemm": "gemm",
    "softmax": "softmax",
    "layernorm": "layernorm",
    "copy": "copy",
    "fill": "fill",
    "strided": "strided",
    "reread": "reread",
}


def kernel_names() -> tuple[str, ...]:
    """The names of the kernels, in the order of the story they tell."""
    return tuple(_MODULES)


def load_kernel(name: str) -> Kernel:
    """The kernel called `name`. Raises RequestError for an unknown one."""
    if name not in _MODULES:
        raise unknown_name("kernel", name, _MODULES)
    kernel: Kernel = import_module(f"iosim.kernels.{_MODULES[name]}").KERNEL
    return kernel
