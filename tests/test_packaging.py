"""What is built holds all that the checkout holds, the two linked folders as real files."""

import stat
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("hardware_profiles", "kernels")
WANTED = {".py", ".toml", ".typed"}

pytest.importorskip("build", reason="the package `build` is not installed (extra `test`)")
pytest.importorskip("hatchling", reason="the package `hatchling` is not installed (extra `test`)")


def shipped() -> Iterator[tuple[str, Path]]:
    """Each file that the wheel must hold: its name there, its path in the checkout."""
    for folder in ("iosim", *LINKED):
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            linked = name.split("/")[1] in LINKED  # seen through the link, on some versions
            if path.suffix in WANTED and not (folder == "iosim" and linked):
                yield (name if folder == "iosim" else f"iosim/{name}"), path


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of the checkout and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(folder), "."]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return folder


@pytest.fixture
def wheel(dist: Path) -> Iterator[ZipFile]:
    [path] = dist.glob("*.whl")
    with ZipFile(path) as archive:
        yield archive


def test_wheel_holds_every_file(wheel: ZipFile) -> None:
    names = set(wheel.namelist())
    wanted = dict(shipped())
    assert {f"iosim/{folder}" for folder in LINKED} <= {str(Path(name).parent) for name in wanted}
    assert not wanted.keys() - names
    changed = [name for name, path in wanted.items() if wheel.read(name) != path.read_bytes()]
    assert not changed


def test_wheel_holds_nothing_else(wheel: ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    [metadata] = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"iosim", metadata}
    assert f"{metadata}/licenses/LICENSE" in wheel.namelist()
    extra = {n for n in wheel.namelist() if n.startswith("iosim/")} - dict(shipped()).keys()
    assert not {name for name in extra if Path(name).suffix in WANTED | {".pyc"}}


def test_wheel_holds_no_links(wheel: ZipFile) -> None:
    links = [i.filename for i in wheel.infolist() if stat.S_ISLNK(i.external_attr >> 16)]
    assert not links


def test_wheel_runs_without_the_checkout(wheel: ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from iosim.profiles import load_profile, profile_names\n"
        "print(*(load_profile(name).name for name in profile_names()))"
    )
    command = [sys.executable, "-I", "-c", script, str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == sorted(p.stem for p in ROOT.glob("hardware_profiles/*.toml"))


def test_sdist_can_be_tested(dist: Path) -> None:
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in ("hardware_profiles", "kernels", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in WANTED
    }
    wanted |= {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", *dict(shipped())}
    assert not wanted - names
