"""Files are written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from iosim.errors import RequestError
from iosim.report.files import require_suffix, require_writable, write_whole


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "one")
    path.chmod(0o640)
    write_whole(path, b"two")
    assert path.read_text() == "two"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real.txt", tmp_path / "link.txt"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"


def test_nothing_is_left_where_writing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RequestError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", ["missing/a.txt", ".", "a" * 300, "file/a.txt"])
def test_what_cannot_be_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot write"):
        require_writable(tmp_path / name)


def test_a_pipe_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    with pytest.raises(RequestError, match="not a regular file"):
        write_whole(path, "text")
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RequestError, match="no permission"):
        require_writable(tmp_path / "a.txt")


def test_suffixes() -> None:
    assert require_suffix(Path("a.JSON"), (".json",)) == ".json"
    with pytest.raises(RequestError, match=r"no suffix.*\.json, \.csv"):
        require_suffix(Path("a"), (".json", ".csv"))
