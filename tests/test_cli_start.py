"""How the command line starts and ends: quickly, with nothing it does not need, and quietly."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("analyze", "sweep", "diff", "validate", "profiles", "kernels")
SLOW_TO_IMPORT = {"matplotlib", "numba", "scipy", "simpy"}
QUICK = [["--help"], [], ["--version"], ["profiles"], *([name, "--help"] for name in COMMANDS)]
START_SECONDS = 0.3


def iosim(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A run of the checkout's `python -m iosim`; `more` are environment variables."""
    return subprocess.run(
        [sys.executable, "-m", "iosim", *arguments],
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_starts_without_the_slow_ones(arguments: list[str]) -> None:
    script = (
        "import json, sys\n"
        "from iosim.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    code, modules = json.loads(run.stderr.splitlines()[-1])
    assert code == 0
    assert run.stdout
    assert not SLOW_TO_IMPORT & set(modules)
    assert "numpy" not in modules


@pytest.mark.parametrize("arguments", [["--help"], ["analyze", "--help"], ["profiles"]])
def test_starts_in_a_moment(arguments: list[str]) -> None:
    """Processor time: what other work on this machine takes does not count."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert iosim(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < START_SECONDS


def test_help_names_every_flag_of_the_interface() -> None:
    text = iosim("analyze", "--help").stdout
    flags = (
        "--profile --kernel --batch --heads --kv-heads --seqlen --seqlen-k --head-dim --causal "
        "--align --window --m --n --k --group --bytes --elements --mode --reps --stride --dtype "
        "--tile --order --stages --warps --registers --clock --cache --fidelity --seed --seeds "
        "--against --output --json"
    )
    assert not [flag for flag in flags.split() if f"{flag} " not in text]
    assert max(len(line) for line in text.splitlines()) <= 80


def test_help_lists_the_commands() -> None:
    text = iosim("--help").stdout
    assert not [name for name in COMMANDS if f"  {name} " not in text]


def test_a_closed_pipe_is_silent() -> None:
    script = f"{sys.executable} -m iosim profiles h200 | head -n 1"
    run = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], cwd=ROOT, capture_output=True, check=False
    )
    assert run.stdout.count(b"\n") == 1
    assert run.stderr == b""
    assert run.returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line() -> None:
    script = f"{sys.executable} -m iosim profiles h200 > /dev/full"
    run = subprocess.run(
        ["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("iosim: ")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_terminal_can_show_it(encoding: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "iosim", "profiles", "h200"],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    assert "cores" in run.stdout.decode(encoding)


def test_ctrl_c_is_one_line_and_130() -> None:
    """In the middle of compiled code, which does not hear it."""
    long = ["analyze", "--profile", "h200", "--kernel", "flash2", "--seqlen", "256k"]
    process = subprocess.Popen(
        [sys.executable, "-m", "iosim", *long],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(4)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "iosim: interrupted"
    assert "Traceback" not in err


def test_colours_only_where_somebody_looks() -> None:
    assert "\x1b" not in iosim("profiles").stdout
    assert "\x1b[" in iosim("profiles", FORCE_COLOR="1").stdout
