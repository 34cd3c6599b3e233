"""Files that are written whole or not at all, in the form that their suffix names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from iosim.errors import RequestError


def require_suffix(path: Path, possible: Iterable[str]) -> str:
    """The suffix of `path`, which names the form. Raises RequestError for one not possible."""
    suffix = path.suffix.lower()
    if suffix not in possible:
        said = f"the suffix {suffix!r}" if suffix else "no suffix"
        raise RequestError(f"{str(path)!r} has {said} (possible: {', '.join(possible)})")
    return suffix


def require_writable(path: Path) -> None:
    """Raises RequestError where `path` cannot become a file: before the work, not after it."""
    target = _target(path)
    folder = target.parent
    try:
        kind = target.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        kind = None
    except OSError as error:  # a name that no file can have
        raise _refused(path, error.strerror or str(error)) from error
    if not folder.is_dir():
        raise _refused(path, f"there is no folder {str(folder)!r}")
    if kind is not None and not stat.S_ISREG(kind):
        raise _refused(path, "it is not a regular file")
    if not os.access(folder, os.W_OK) or (kind is not None and not os.access(target, os.W_OK)):
        raise _refused(path, "no permission")


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file beside its place, then puts it there. Raises RequestError."""
    require_writable(path)
    target = _target(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    draft = target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
    try:
        draft.write_bytes(data)
        if target.exists():
            draft.chmod(stat.S_IMODE(target.stat().st_mode))
        draft.replace(target)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    finally:
        draft.unlink(missing_ok=True)


def _target(path: Path) -> Path:
    """Where the bytes go: links are followed, so that they stay links."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise _refused(path, getattr(error, "strerror", None) or str(error)) from error


def _refused(path: Path, reason: str) -> RequestError:
    return RequestError(f"cannot write {str(path)!r}: {reason}")
