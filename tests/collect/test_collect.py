"""Collecting: cases as data, what the profiler prints as rows, refusals where there is no GPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from iosim.collect import ncu
from iosim.collect.cases import probes
from iosim.collect.run import collect, joined
from iosim.errors import CountersError, RequestError

ROOT = Path(__file__).resolve().parents[2]
ROWS = ROOT / "reports" / "h200-probes" / "rows.jsonl"

PRINTED = """==PROF== Connected to process 854
{"device": "some GPU"}
"ID","Kernel Name","dram__bytes_read.sum","lts__t_sectors_srcunit_tex.sum","sm__cycles_elapsed.max"
"","","byte","sector","cycle"
"0","iosim:read/bytes1048576/own1/read","1,055,488","64,807,314","684,685"
"1","iosim:read/bytes2097152/own1/read","n/a","2","3"
"""


def test_cases_have_names_of_their_own() -> None:
    cases = probes(132)
    assert len({case.id for case in cases}) == len(cases) >= 60
    assert sum(case.counted for case in cases) >= 60
    assert {case.family for case in cases} >= {"chase", "read", "products", "units", "empty"}


def test_a_page_of_the_profiler_becomes_rows() -> None:
    first, second = ncu.launches(PRINTED)
    assert first[0] == "read/bytes1048576/own1"
    assert first[1]["dram_read_bytes"] == 1_055_488
    assert first[1]["l2_from_l1_bytes"] == 64_807_314 * 32
    assert "dram_read_bytes" not in second[1]


def test_a_profiler_without_counters_says_why() -> None:
    with pytest.raises(CountersError, match="ERR_NVGPUCTRPERM"):
        ncu.launches("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM no permission\n")


def test_repeats_become_a_median_and_a_range() -> None:
    said = [{"id": "a/1", "family": "a", "params": {}, "event_ns": n} for n in (5, 3, 4)]
    counted = [("a/1", {"sm_cycles": 7}), ("a/1", {"sm_cycles": 7}), ("a/1", {"sm_cycles": 9})]
    [row] = joined(said, counted)
    assert (row["sm_cycles"], row["range"]) == (7, {"sm_cycles": [7, 9]})
    assert (row["probe"]["event_ns"], row["probe"]["range"]["event_ns"]) == (4, [3, 5])


def test_the_command_names_every_metric() -> None:
    line = " ".join(ncu.command(["python", "x.py"]))
    assert all(metric in line for metric, _ in ncu.METRICS.values())
    assert line.endswith("python x.py")


def test_without_a_gpu_there_is_one_line_and_the_command(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch") if importlib.util.find_spec("torch") else None
    if torch is not None and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    target = tmp_path / "rows.jsonl"
    with pytest.raises(RequestError, match=r"python -m iosim\.collect"):
        collect(target)
    program = [sys.executable, "-m", "iosim.collect", str(target)]
    run = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 2
    assert len(run.stderr.splitlines()) == 1
    assert not target.exists()


def test_the_committed_rows_are_of_these_cases() -> None:
    head, *rows = map(json.loads, ROWS.read_text(encoding="utf-8").splitlines())
    assert head["repeats"] == 3
    known = {case.id for case in probes(head["sms"])}
    assert {row["id"] for row in rows} == known
    assert not any("error" in row for row in rows)
    [stored] = [row for row in rows if row["family"] == "stored-then-read"]
    assert stored["l1_fill_bytes"] == 0  # what a block stored it reads again without a fill


def test_the_page_states_what_its_command_prints() -> None:
    folder = ROWS.parent
    run = subprocess.run(
        [sys.executable, "show.py"], capture_output=True, text=True, cwd=folder, check=True
    )
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert f"$ python show.py\n{run.stdout}```" in page
