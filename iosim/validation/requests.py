"""Which run answers a counter row: the kernel, problem and schedule that its family names.

Only launch facts are used (parameters, shared memory, registers), never a counter or a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from iosim.chip import Chip
from iosim.counters.table import CounterRow
from iosim.errors import RequestError
from iosim.problem import Attention, Gemm, Problem, Rows, Schedule, Stream
from iosim.profiles import load_profile
from iosim.units import ceil_div

_MIB_OF_FP16 = 1024**2 // 2
_THREADS_PER_WARP = 32
_RESERVE_BYTES = 1024
_LAYERNORM_VECTOR = 4  # elements that a thread of PyTorch's layernorm reads at once


@dataclass(frozen=True, kw_only=True)
class Request:
    """One simulation: what `simulate` is called with.

    `launch` names the one that the row is of, where a profiler saw only one of several.
    """

    kernel: str
    problem: Problem
    schedule: Schedule
    launch: str = ""


def request_of(row: CounterRow, chip: Chip | None) -> Request | str:
    """The run that answers `row`, or one line that says why there is none.

    `chip` is the one the file is read for; TPU rows name their own.
    """
    if row.kind == "tpu-flash":
        return _pallas_flash(row.fields)
    if row.kind == "tpu-xla":
        return "standard attention as XLA builds it is not modelled yet"
    if chip is None:
        return "the row does not name its chip; give --profile"
    make = _FAMILIES.get(row.family)
    if make is None:
        return f"no kernel for the family {row.family} yet"
    try:
        return make(row.fields["params"], row.fields)
    except KeyError as error:
        return f"the row lacks the parameter {error.args[0]}"
    except RequestError as error:
        return str(error)


def chip_of(row: CounterRow, chip: Chip | None) -> Chip | None:
    """The chip of a row: named in it, else the one the file is read for."""
    return load_profile(str(row.fields["chip"])) if row.kind != "gpu" else chip


def _launched(row: dict[str, Any], schedule: Schedule) -> Schedule:
    """`schedule` with the facts of the launch: threads, registers, spills, shared memory.

    The profiler counts the reserve of a block in; the schedule does not. Where nobody said how many
    registers spill, that stays open.
    """
    spills = row.get("spills")
    return replace(
        schedule,
        warps=int(row.get("block") or 0) // _THREADS_PER_WARP or schedule.warps,
        registers=int(row.get("registers") or 0),
        shared_bytes=max(0, int(row.get("smem_per_block") or 0) - _RESERVE_BYTES),
        spills=None if spills is None else int(spills),
    )


def _fa2(p: dict[str, Any], row: dict[str, Any]) -> Request:
    problem = Attention(
        batch=p["B"],
        heads=p["H"],
        kv_heads=p["HK"],
        seqlen=p["N"],
        seqlen_k=p["NK"],
        head_dim=p["D"],
        causal=p["causal"],
        align="top-left",
    )
    schedule = Schedule(
        tile=(p["BM"], p["BN"]), order=p["order"], stages=p["stages"], warps=p["warps"]
    )
    return Request(kernel="flash2", problem=problem, schedule=_launched(row, schedule))


def _fa1(p: dict[str, Any], row: dict[str, Any]) -> Request:
    problem = Attention(batch=p["B"], heads=p["H"], seqlen=p["N"], head_dim=p["D"])
    schedule = Schedule(tile=(p["BM"], p["BN"]), stages=1, warps=p["warps"])
    return Request(kernel="flash1", problem=problem, schedule=_launched(row, schedule))


def _decode(p: dict[str, Any], row: dict[str, Any]) -> Request:
    """Split K and V: G query rows of every KV head; the launch that combines is not profiled."""
    problem = Attention(
        batch=p["B"],
        heads=p["HK"] * p["G"],
        kv_heads=p["HK"],
        seqlen=1,
        seqlen_k=p["NK"],
        head_dim=p["D"],
    )
    schedule = Schedule(tile=(p["G"], p["BN"]), stages=3, splits=p["splits"])
    return Request(
        kernel="flash-decode", problem=problem, schedule=_launched(row, schedule), launch="split"
    )


def _gemm(p: dict[str, Any], row: dict[str, Any]) -> Request:
    tile = (p["BM"], p["BN"], p["BK"])
    schedule = Schedule(tile=tile, group=p["G"], stages=p["stages"], warps=p["warps"])
    problem = Gemm(m=p["M"], n=p["N"], k=p["K"])
    return Request(kernel="gemm", problem=problem, schedule=_launched(row, schedule))


def _softmax(p: dict[str, Any], row: dict[str, Any]) -> Request:
    problem = Rows(rows=p["B"] * p["H"] * p["N"], cols=p["N"])
    tile = (ceil_div(problem.rows, row["grid"]), problem.cols)
    schedule = Schedule(tile=tile, stages=1, variant="one-pass")
    return Request(kernel="softmax", problem=problem, schedule=_launched(row, schedule))


def _layernorm(p: dict[str, Any], row: dict[str, Any]) -> Request:
    problem = Rows(rows=p["R"], cols=p["C"])
    tile = (ceil_div(problem.rows, row["grid"]), row["block"] * _LAYERNORM_VECTOR)
    schedule = Schedule(tile=tile, stages=1, variant="two-reads")
    return Request(kernel="layernorm", problem=problem, schedule=_launched(row, schedule))


def _stream(kernel: str) -> Callable[[dict[str, Any], dict[str, Any]], Request]:
    def make(p: dict[str, Any], row: dict[str, Any]) -> Request:
        elements = p["n"] if "n" in p else p["mb"] * _MIB_OF_FP16
        problem = Stream(
            elements=elements,
            stride=p.get("stride", 1),
            mode=p.get("mode", "private"),
            reps=p.get("reps", 1),
        )
        return Request(kernel=kernel, problem=problem, schedule=_launched(row, Schedule()))

    return make


def _pallas_flash(row: dict[str, Any]) -> Request:
    """JAX's flash attention: grid batch, head, query block, key block; top-left causal mask."""
    problem = Attention(
        batch=row["batch"],
        heads=row["heads"],
        seqlen=row["seqlen"],
        seqlen_k=row.get("seqlen_k", row["seqlen"]),
        head_dim=row["head_dim"],
        causal=row.get("causal", False),
        align="top-left",
        dtype="bf16",
    )
    tile = (row["block_q"], row["block_k_major"], row.get("block_k", row["block_k_major"]))
    return Request(kernel="flash2", problem=problem, schedule=Schedule(tile=tile))


_FAMILIES = {
    "fa2": _fa2,
    "fa1": _fa1,
    "decode": _decode,
    "gemm": _gemm,
    "naive-softmax": _softmax,
    "layernorm": _layernorm,
    "copy": _stream("copy"),
    "copy-odd": _stream("copy"),
    "fill": _stream("fill"),
    "strided": _stream("strided"),
    "reread": _stream("reread"),
}
