"""The one door to Numba: how kernels and the engine are compiled, and where the result is kept.

Numba's own cache looks only at the file of the cached function, not at the files that it inlines,
so a change in a helper would leave stale machine code behind. The cache folder here is therefore
named by a digest of every source file of the package. `NUMBA_CACHE_DIR`, if set, is its parent.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

_KEPT_DIGESTS = 4  # two checkouts side by side must not delete each other's folder
_PACKAGE = Path(__file__).parent


def jit(function: F) -> F:
    """Compile `function` for use from Python, cached on disk. It must not allocate arrays."""
    return _cached(function, allocates=False)


def program(function: F) -> F:
    """Like `jit` for block programs, whose computing version allocates its scratch."""
    return _cached(function, allocates=True)


def inline(function: F) -> F:
    """For the small helpers of a hot loop: no cache entry of their own, no reference counts."""
    compiled: F = numba.njit(nogil=True, error_model="numpy", _nrt=False)(function)
    return compiled


def numeric(function: F) -> F:
    """Like `inline` for helpers that allocate scratch arrays."""
    compiled: F = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled


@cache
def source_digest() -> str:
    """A digest of every Python file of the package, in a fixed order."""
    digest = hashlib.sha256(numba.__version__.encode() + sys.version.encode())
    for name in sorted(glob.glob(str(_PACKAGE / "**" / "*.py"), recursive=True)):
        digest.update(os.path.relpath(name, _PACKAGE).encode())
        digest.update(Path(name).read_bytes())
    return digest.hexdigest()[:16]


@cache
def cache_folder() -> Path:
    """Where machine code of exactly these sources is kept; older digests are removed."""
    parent = os.environ.get("NUMBA_CACHE_DIR") or _user_cache() / "iosim"
    folder = Path(parent) / source_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        others = [p for p in folder.parent.iterdir() if p.is_dir() and len(p.name) == 16]
        for old in sorted(others, key=lambda p: p.stat().st_mtime)[:-_KEPT_DIGESTS]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError:
        return Path(numba.config.CACHE_DIR or ".")  # read-only home: Numba falls back by itself
    return folder


def is_cold() -> bool:
    """Whether nothing has been compiled for these sources yet (the first run takes longer)."""
    return not any(cache_folder().glob("**/*.nbi"))


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _cached(function: F, allocates: bool) -> F:
    # Without the reference counts of NRT the hot loop of the engine is a third faster.
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        compiled: F = numba.njit(cache=True, nogil=True, error_model="numpy", _nrt=allocates)(
            function
        )
    finally:
        numba.config.CACHE_DIR = before
    return compiled
