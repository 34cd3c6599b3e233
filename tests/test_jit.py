"""The door to Numba: what the cache is named by, where it lies, and what happens without one."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import iosim.jit
from iosim.jit import cache_folder, is_cold, jit, source_digest

ROOT = Path(__file__).resolve().parents[1]


def triple(x):
    return 3 * x


@pytest.fixture
def fresh_folder():
    """Forgets the cache folder before and after, so that a test may move it."""
    cache_folder.cache_clear()
    yield
    cache_folder.cache_clear()


@pytest.fixture
def nowhere(tmp_path, monkeypatch, fresh_folder):
    """No folder can be made for the cache: its parent is a file."""
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(file / "below"))
    return file


@pytest.fixture
def package(tmp_path):
    """A package with one file in each of two folders."""
    for name in ("engine/loop.py", "cli/flags.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


def test_digest_sees_what_is_compiled(package):
    before = source_digest(package)
    assert source_digest(package) == before
    (package / "engine" / "loop.py").write_text("x = 2\n")
    assert source_digest(package) != before


@pytest.mark.parametrize("name", ["cli/flags.py", "report/new.py", "study/new.py"])
def test_digest_does_not_see_help_texts(package, name):
    before = source_digest(package)
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_text("x = 2\n")
    assert source_digest(package) == before


def test_a_renamed_file_is_another_source(package):
    before = source_digest(package)
    (package / "engine" / "loop.py").rename(package / "engine" / "other.py")
    assert source_digest(package) != before


def test_everything_compiled_is_in_the_digest():
    """What is left out never imports the door to Numba at module level."""
    for folder in iosim.jit._NEVER_COMPILED:
        assert (ROOT / "iosim" / folder).is_dir(), folder
        for path in (ROOT / "iosim" / folder).glob("**/*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                assert not line.startswith(("from iosim.jit", "from iosim.emit")), path


def test_numba_cache_dir_wins(tmp_path, monkeypatch, fresh_folder):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "mine" / source_digest()
    assert jit(triple)(2) == 6
    assert list((tmp_path / "mine").glob("*/*/test_jit.triple-*.nbi"))
    assert not (tmp_path / "other").exists()


def test_without_it_the_users_cache_is_taken(tmp_path, monkeypatch, fresh_folder):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "iosim" / source_digest()


def test_old_folders_go_but_others_stay(tmp_path, monkeypatch, fresh_folder):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for age in range(6):
        (tmp_path / f"{age:016x}").mkdir()
        os.utime(tmp_path / f"{age:016x}", (1e9 - age, 1e9 - age))
    (tmp_path / "somebody else's").mkdir()
    cache_folder()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {source_digest(), *(f"{age:016x}" for age in range(3)), "somebody else's"}


def test_is_cold_until_compiled(tmp_path, monkeypatch, fresh_folder):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert is_cold("test_jit")
    assert not is_cold()
    assert jit(triple)(2) == 6
    assert not is_cold("test_jit")
    assert is_cold("test_jit", "no_such_module")


def test_compiles_without_a_cache_where_nothing_can_be_written(nowhere):
    assert cache_folder() is None
    assert is_cold("test_jit")
    assert jit(triple)(2) == 6
    assert nowhere.is_file()


def test_compiles_a_function_without_a_file():
    names: dict = {}
    exec("def double(x):\n    return 2 * x\n", names)
    assert jit(names["double"])(4) == 8
    assert str(cache_folder()) not in str(numba.config.CACHE_DIR)  # it was lent, not changed


def test_the_package_loads_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    script = (
        "import numpy as np\n"
        "from iosim.memory.cache import popcount\n"
        "from iosim.engine.slots import make_room\n"
        "print(popcount(np.int64(7)))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "file")}
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "3"
