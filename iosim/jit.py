"""The one door to Numba: how kernels and the engine are compiled, and where the result is kept.

Numba's own cache looks only at the file of the cached function, not at the files that it inlines,
so a change in a helper would leave stale machine code behind. The cache folder here is therefore
named by a digest of all sources that compiled code can come from. `NUMBA_CACHE_DIR`, if set, is its
parent. Where nothing can be written, every process compiles for itself.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

_KEPT_DIGESTS = 4  # two checkouts side by side must not delete each other's folder
_PACKAGE = Path(__file__).parent
_NEVER_COMPILED = {"cli", "counters", "report", "study", "validation"}


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


def source_digest(package: Path = _PACKAGE) -> str:
    """A digest of every Python file of `package` that is compiled or inlined, in a fixed order."""
    digest = hashlib.sha256(numba.__version__.encode() + sys.version.encode())
    for name in sorted(glob.glob(str(package / "**" / "*.py"), recursive=True)):
        inside = Path(name).relative_to(package)
        if inside.parts[0] not in _NEVER_COMPILED:
            digest.update(inside.as_posix().encode())
            digest.update(Path(name).read_bytes())
    return digest.hexdigest()[:16]


@cache
def cache_folder() -> Path | None:
    """Where machine code of exactly these sources is kept; None where nothing can be written.

    Folders of older digests are removed.
    """
    parent = os.environ.get("NUMBA_CACHE_DIR") or _user_cache() / "iosim"
    folder = Path(parent) / source_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.utime(folder)
        _remove_old(folder.parent)
    except OSError:
        return None
    return folder


def is_cold(*names: str) -> bool:
    """Whether any of these modules, such as `flash2`, has no machine code yet in the cache.

    The first run takes longer then: Numba compiles.
    """
    folder = cache_folder()
    kept = {path.name.split(".")[0] for path in folder.glob("*/*.nbi")} if folder else set()
    return not kept.issuperset(names)


def _remove_old(parent: Path) -> None:
    folders = [p for p in parent.iterdir() if p.is_dir() and len(p.name) == 16]
    for old in sorted(folders, key=lambda p: p.stat().st_mtime)[:-_KEPT_DIGESTS]:
        shutil.rmtree(old, ignore_errors=True)


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _cached(function: F, allocates: bool) -> F:
    # Without the reference counts of NRT the hot loop of the engine is a third faster.
    compile_ = functools.partial(numba.njit, nogil=True, error_model="numpy", _nrt=allocates)
    folder = cache_folder()
    before = numba.config.CACHE_DIR
    compiled: F
    if folder is not None:
        numba.config.CACHE_DIR = str(folder)
        try:
            compiled = compile_(cache=True)(function)
            return compiled
        except RuntimeError:
            pass  # a function without a file, typed at a prompt: nothing to name its code by
        finally:
            numba.config.CACHE_DIR = before
    compiled = compile_()(function)
    return compiled
