"""Whatever is wrong on the command line: one line on stderr, exit 2, and nothing else anywhere."""

import json
import os
from pathlib import Path

import pytest

from iosim.cli import main

ANALYZE = ["analyze", "--profile", "tpu-v5e", "--kernel", "flash2"]
ON_GPU = ["analyze", "--profile", "h200", "--kernel", "flash2"]
COPY = ["analyze", "--profile", "h200", "--kernel", "copy"]
SWEEP = ["sweep", "--profile", "tpu-v5e", "--kernel", "flash2"]

#: arguments, and a word that the line must hold
BAD = [
    (["analyse"], "analyze"),
    (["--nonsense"], "--nonsense"),
    (["analyze"], "--profile"),
    (["analyze", "--profile"], "--profile"),
    (["analyze", "--profile", "h2000"], "h200"),
    (["analyze", "--profile", "h200", "--kernel", "flash9"], "flash2"),
    (["analyze", "--profile", "missing.toml"], "missing.toml"),
    (["analyze", "--profile", "{inputs}/broken.toml"], "broken.toml"),
    (["analyze", "--profile", "{inputs}/folder.toml"], "folder.toml"),
    (["analyze", "--profile", ""], "--profile"),
    ([*ANALYZE, "--seqlen", "abc"], "--seqlen"),
    ([*ANALYZE, "--seqlen", ""], "--seqlen"),
    ([*ANALYZE, "--seqlen", "0"], "--seqlen"),
    ([*ANALYZE, "--seqlen", "-1"], "--seqlen"),
    ([*ANALYZE, "--seqlen", "1.5"], "1.5"),
    ([*ANALYZE, "--seqlen", "1k,2k"], "--seqlen"),
    ([*ANALYZE, "--seqlen", "99999999999999"], "--seqlen"),
    ([*ANALYZE, "--seqlen", "9" * 500], "--seqlen"),
    ([*ANALYZE, "--seqlen", "10\n20"], "--seqlen"),
    ([*ANALYZE, "--heads", "3", "--kv-heads", "2"], "multiple"),
    ([*ANALYZE, "--window", "-3"], "--window"),
    ([*ANALYZE, "--align", "middle"], "bottom-right"),
    ([*ANALYZE, "--tile", "64"], "64"),
    ([*ANALYZE, "--tile", "0x64"], "--tile"),
    ([*ANALYZE, "--tile", "²x2"], "--tile"),
    ([*ANALYZE, "--tile", "9" * 400 + "x1"], "--tile"),
    ([*ANALYZE, "--tile", "128x256x96"], "divide"),
    ([*ON_GPU, "--tile", "64x64x64"], "two sizes"),
    ([*ANALYZE, "--dtype", "fp12"], "bf16"),
    ([*ANALYZE, "--dtype", "fp8"], "fp8"),
    ([*ANALYZE, "--order", "diagonal"], "query"),
    ([*ANALYZE, "--m", "64"], "gemm"),
    ([*ANALYZE, "--stride", "2"], "strided"),
    ([*ANALYZE, "--warps", "4"], "GPU"),
    ([*ON_GPU, "--stages", "9"], "stages"),
    ([*ON_GPU, "--spills", "-1"], "--spills must be from 0"),
    ([*ON_GPU, "--spills", "many"], "--spills"),
    ([*ON_GPU, "--spills", "1m"], "spills must be at most 131,072"),
    ([*ON_GPU, "--registers", "0"], "--registers must be from 1"),
    ([*ON_GPU, "--kv-dtype", "fp4"], "fp8, int8"),
    ([*ON_GPU, "--kv-dtype", "int8", "--dtype", "fp8"], "no fewer bytes"),
    ([*ON_GPU, "--variant", ""], "--variant is empty"),
    ([*ON_GPU, "--variant", "sideways"], "variant"),
    ([*ON_GPU, "--splits", "0"], "--splits must be from 1"),
    ([*ON_GPU, "--splits", "4"], "--splits means nothing to flash2"),
    ([*ON_GPU, "--cluster", "2"], "--cluster means nothing to flash2"),
    ([*ON_GPU, "--density", "2"], "--density must be from 0 to 1, not 2"),
    ([*ON_GPU, "--density", "nan"], "--density must be from 0 to 1, not nan"),
    ([*ON_GPU, "--density", "some"], "--density 'some' is not a number"),
    ([*ON_GPU, "--density", "0.5"], "--density means nothing to flash2"),
    ([*ON_GPU, "--mask-block", "0"], "--mask-block must be from 1"),
    ([*ON_GPU, "--pattern-seed", "-1"], "--pattern-seed must be from 0"),
    ([*ON_GPU, "--page-size", "0"], "--page-size must be from 1"),
    ([*ON_GPU, "--page-size", "16"], "--page-size means nothing to flash2"),
    ([*ON_GPU, "--latent-dim", "0"], "--latent-dim must be from 1"),
    ([*ON_GPU, "--rows", "0"], "--rows must be from 1"),
    ([*ON_GPU, "--cols", "64"], "--cols means nothing to flash2"),
    ([*ANALYZE, "--spills", "2"], "GPUs"),
    ([*ANALYZE, "--cluster", "2"], "--cluster"),
    (["analyze", "--profile", "h200", "--kernel", "flash1", "--kv-dtype", "fp8"], "flash2"),
    (["analyze", "--profile", "h200", "--kernel", "standard", "--spills", "2"], "flash1"),
    (["analyze", "--profile", "h200", "--kernel", "gemm", "--kv-dtype", "int8"], "flash2"),
    ([*ON_GPU, "--group", "4"], "gemm"),
    ([*ANALYZE, "--clock", "0"], "--clock"),
    ([*ANALYZE, "--clock", "nan"], "--clock"),
    ([*ANALYZE, "--clock", "fast"], "GHz"),
    ([*ANALYZE, "--cache", "lukewarm"], "cold"),
    ([*ANALYZE, "--cache", "warm"], "no cache"),
    ([*ANALYZE, "--fidelity", "tile"], "line"),
    ([*ANALYZE, "--seeds", "0"], "--seeds"),
    ([*ANALYZE, "--seed", "-1"], "--seed"),
    ([*ANALYZE, "--kernel", "flash2,,standard"], "empty"),
    ([*ANALYZE, "--kernel", "flash1"], "TPU"),
    ([*ANALYZE, "--nonsense"], "--nonsense"),
    ([*ANALYZE, "more"], "more"),
    ([*ANALYZE, "-o", "out.xlsx"], ".json"),
    ([*ANALYZE, "-o", "out.html"], ".csv"),
    ([*ANALYZE, "-o", "out.png"], ".md"),
    ([*ANALYZE, "-o", "out"], "suffix"),
    ([*ANALYZE, "-o", ""], "-o"),
    ([*ANALYZE, "-o", "nowhere/out.json"], "folder"),
    ([*ANALYZE, "-o", "{inputs}/folder.json"], "regular"),
    ([*ANALYZE, "-o", "n" * 300 + ".json"], "cannot"),
    ([*ANALYZE, "--against", ""], "--against"),
    ([*ANALYZE, "--against", " # "], "#"),
    ([*ANALYZE, "--against", "--tile"], "--tile"),
    ([*ANALYZE, "--against", '"--tile'], "quotation"),
    ([*ANALYZE, "--against", "--json"], "--against"),
    ([*ANALYZE, "--against", "--profile nothing"], "nothing"),
    ([*ANALYZE, "--against", "--kernel gemm --seqlen 64"], "--seqlen"),
    (["analyze", "--profile", "h200", "--kernel", "copy", "--bytes", "3"], "fp16"),
    (
        ["analyze", "--profile", "h200", "--kernel", "copy", "--bytes", "4", "--elements", "2"],
        "one",
    ),
    (["analyze", "--profile", "h200", "--kernel", "copy", "--tile", "3x5"], "power of two"),
    ([*SWEEP, "--tile", "64x64,bad"], "bad"),
    ([*SWEEP, "--tile", "64x64,"], "empty"),
    ([*SWEEP, "--plot", "out.pdf"], ".png"),
    ([*SWEEP, "--plot", "out.svg", "-o", "out.svg"], "both"),
    ([*SWEEP, "--plot", "nowhere/out.png"], "folder"),
    ([*SWEEP, "-o", "out.xlsx"], ".csv"),
    ([*SWEEP, "--profile", "tpu-v5e,nothing"], "nothing"),
    ([*SWEEP, "--profile", "tpu-v5e,h200", "--kernel", "flash1"], "tpu-v5e"),
    (["diff"], "A.json"),
    (["diff", "{inputs}/good.json"], "B.json"),
    (["diff", "{inputs}/good.json", "missing.json"], "missing.json"),
    (["diff", "{inputs}/good.json", "{inputs}/broken.toml"], "JSON"),
    (["diff", "{inputs}/good.json", "{inputs}/list.json"], "format"),
    (["diff", "{inputs}/good.json", "{inputs}/new.json"], "format 1"),
    (["diff", "{inputs}/good.json", "{inputs}/empty.json"], "results"),
    (["diff", "{inputs}/good.json", "{inputs}/poor.json"], "lacks"),
    (["diff", "{inputs}/good.json", "{inputs}/words.json"], "numbers"),
    (["diff", "{inputs}/two.json", "{inputs}/other.json"], "nothing to compare"),
    (["diff", "{inputs}/good.json", "{inputs}/good.json", "-o", "d.csv"], ".json"),
    (["validate"], "COUNTERS"),
    (["validate", "missing.jsonl"], "missing.jsonl"),
    (["validate", "{inputs}/folder.json", "--profile", "h200"], "folder.json"),
    (["validate", "{inputs}/broken.toml", "--profile", "h200"], "JSON"),
    (["validate", "{inputs}/rows.jsonl"], "--profile"),
    (["validate", "{inputs}/rows.jsonl", "--profile", "h200", "--family", "copi"], "copy"),
    (["validate", "{inputs}/rows.jsonl", "--profile", "h200", "-o", "v.xml"], ".json"),
    (["profiles", "h300"], "h200"),
    (["profiles", "h200", "h100"], "h100"),
    (["kernels", "flsh2"], "flash2"),
    (["kernels", "flash2", "--profile", "none"], "none"),
    (["kernels", "flash1", "--profile", "tpu-v4"], "tpu"),
]


def entry(kernel: str) -> dict[str, object]:
    """A result as small as can be."""
    return {
        "kernel": kernel,
        "profile": "p",
        "problem": {},
        "tile": {"m": 1},
        "compulsory": {},
        "operands": {},
        "traffic": None,
    }


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files that are wrong in one way each."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "folder.toml").mkdir()
    (folder / "folder.json").mkdir()
    (folder / "broken.toml").write_text("name = [")
    documents = {
        "good": {"format": 1, "results": [entry("a")]},
        "list": [1, 2],
        "new": {"format": 2, "results": []},
        "empty": {"format": 1, "results": []},
        "poor": {"format": 1, "results": [{"kernel": "a"}]},
        "words": {"format": 1, "results": [{**entry("a"), "traffic": {"x": "y"}}]},
        "two": {"format": 1, "results": [entry("a"), entry("b")]},
        "other": {"format": 1, "results": [entry("c"), entry("d")]},
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    row = {"id": "copy/4MB", "family": "copy", "kernel": "k", "params": {"mb": 4}}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    return folder


@pytest.mark.parametrize(
    ("arguments", "word"), BAD, ids=lambda v: " ".join(v)[-60:] if isinstance(v, list) else ""
)
def test_one_line_and_exit_2(
    arguments: list[str],
    word: str,
    inputs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main([argument.replace("{inputs}", str(inputs)) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("iosim: ")
    assert word in lines[0]
    assert len(lines[0]) < 700
    assert os.listdir(tmp_path) == []
