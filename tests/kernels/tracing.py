"""Runs block programs block by block, and traces in plain Python what they really touch.

`compute` and `count` run a launch in this process, compiled. A `Tracer` is a second process without
Numba's compiler (`NUMBA_DISABLE_JIT`): there the same program runs as Python on arrays that write
down every element that is read or written, and `check_launch` holds that against the operations.

Arrays are given by operand name, float64, shaped [matrices, rows, columns] or fewer axes; `tensors`
of a program are the arrays of the launch's operands in order, then those that it does not name.
"""

import os
import pickle
import random
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from iosim.chip import Chip
from iosim.kernels import load_kernel, reference
from iosim.launch import Launch
from iosim.memory.layout import matrix
from iosim.ops import ATOMIC, LOAD, MATRIX, OP_DTYPE, STORE, WINDOW
from iosim.problem import Attention, Problem, Schedule
from iosim.profiles import load_profile
from iosim.units import dtype_bytes

ROOT = Path(__file__).resolve().parents[2]


class Tracked:
    """An array that writes down the flat index of every element that is read or written."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.shape, self.size, self.ndim = values.shape, values.size, values.ndim
        self.ids = np.arange(values.size).reshape(values.shape)
        self.read: set[int] = set()
        self.written: set[int] = set()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index):
        assert np.min(index) >= 0 or isinstance(index, slice), f"negative index {index}"
        self.read.update(np.ravel(self.ids[index]).tolist())
        return self.values[index].copy()

    def __setitem__(self, index, value) -> None:
        self.written.update(np.ravel(self.ids[index]).tolist())
        self.values[index] = value


ABSENT = np.zeros((1, 1, 1))  # stands for an operand that the launch does not have


def tensors_of(launch: Launch, arrays: dict) -> tuple:
    """The arrays in the order in which the block program takes them."""
    named = [operand.name for operand in launch.operands]
    rest = [n for n in arrays if n not in named]
    return tuple(arrays.get(n, ABSENT) for n in [*named, *rest])


def exact(launch: Launch) -> Launch:
    """The launch with numbers that are not rounded to the dtype of the problem."""
    record = launch.params[0] if isinstance(launch.params, tuple) else launch.params
    if "digits" in record.dtype.names:
        record["digits"] = 0
    return launch


def emit(launch: Launch, block: int, first: int, last: int, tensors=None):
    """(operations, done) of steps [first, last) of one block; never more of them than allowed."""
    steps = max(0, min(last, launch.steps) - first)
    most = launch.ops_per_step * steps + launch.ops_at_ends
    out = np.zeros(most + 64, dtype=OP_DTYPE)
    params = launch.params
    if not hasattr(launch.program, "py_func"):  # fields as attributes, as compiled code sees them
        out = out.view(np.recarray)
        params = (
            tuple(map(as_attributes, params))
            if isinstance(params, tuple)
            else as_attributes(params)
        )
    written, done = launch.program(block, first, last, params, out, tensors)
    assert written <= most, f"{launch.name}: {written} operations in {steps} steps, not {most}"
    return np.array(out[:written], dtype=OP_DTYPE), bool(done)


def as_attributes(part):
    """A record as compiled code sees it; a table stays as it is."""
    names = part.dtype.names
    return part if names is None else SimpleNamespace(**{n: part[n].item() for n in names})


def count(launch: Launch, block: int, cuts=()):
    """All operations of one block, asked for in the ranges that `cuts` make."""
    parts = []
    edges = [0, *cuts, max(launch.steps, 1)]
    for first, last in pairwise(edges):
        part, done = emit(launch, block, first, last)
        parts.append(part)
        if done:
            break
    assert done, f"{launch.name}: block {block} is not done after {launch.steps} steps"
    return np.concatenate(parts)


def compute(launch: Launch, arrays: dict) -> list:
    """Computes all blocks of a launch on `arrays`; gives the operations of each."""
    tensors = tensors_of(launch, arrays)
    every = []
    for block in range(launch.blocks):
        ops, done = emit(launch, block, 0, max(launch.steps, 1), tensors)
        assert done, f"{launch.name}: block {block} is not done after {launch.steps} steps"
        every.append(ops)
    return every


def byte_strides(shape, size_bytes: int, chip: Chip, likely: int):
    """(bytes per element, byte stride of each axis) of an operand of `size_bytes` on `chip`.

    Padding can make several element sizes possible: the `likely` one is then taken.
    """
    count, rows, columns = (1, 1, 1, *shape)[-3:]
    for itemsize in (likely, 4, 2, 1):
        lies = matrix(chip, count, rows, columns, itemsize)
        if lies.size_bytes == size_bytes:
            strides = (lies.rows * lies.row_bytes, lies.row_bytes, itemsize)
            return itemsize, strides[3 - len(shape) :]
    raise AssertionError(f"no element size gives {size_bytes} bytes for a tensor of shape {shape}")


def reported_bytes(ops) -> np.ndarray:
    """The byte addresses of the boxes of `ops`, each once."""
    boxes = [
        (int(op["address"]) + np.arange(op["rows"])[:, None] * op["pitch_bytes"])
        + np.arange(op["row_bytes"])
        for op in ops
    ]
    return np.unique(np.concatenate([b.ravel() for b in boxes])) if boxes else np.empty(0, np.int64)


def touched_bytes(ids: set, shape, strides, itemsize: int, address: int) -> np.ndarray:
    """The byte addresses of elements given by flat index."""
    where = np.array(np.unravel_index(np.array(sorted(ids), dtype=np.int64), shape))
    starts = address + np.tensordot(np.array(strides), where, axes=1)
    return np.unique(starts[:, None] + np.arange(itemsize))


def idle_loads(ops):
    """Window loads of steps that compute nothing: a grid brings a window there nonetheless."""
    busy = set(ops["step"][ops["kind"] == MATRIX].tolist())
    idle = np.array([step not in busy for step in ops["step"].tolist()], dtype=bool)
    return ops[(ops["kind"] == LOAD) & (ops["flags"] & WINDOW != 0) & idle]


def check_operand(index, operand, tracked, ops, chip, likely) -> None:
    """What one block touched of one operand against what its operations say."""
    itemsize, strides = byte_strides(tracked.shape, operand.size_bytes, chip, likely)
    lies = (tracked.shape, strides, itemsize, operand.address)
    everything = touched_bytes(set(range(tracked.size)), *lies)
    mine = ops[ops["tensor"] == index]
    for kind, ids in ((LOAD, tracked.read), (STORE, tracked.written)):
        touched = touched_bytes(ids, *lies)
        boxes = mine[(mine["kind"] == kind) | (mine["kind"] == ATOMIC)]  # that does both
        reported = reported_bytes(boxes)
        who = f"{operand.name}, {'read' if kind == LOAD else 'written'}"
        inside = (reported >= operand.address) & (reported < operand.address + operand.size_bytes)
        assert inside.all(), f"{who}: an operation reaches outside the operand"
        if chip.grid is not None:
            reported = np.intersect1d(reported, everything)  # the rest is padding
        missing = np.setdiff1d(touched, reported)
        assert not missing.size, f"{who} but not reported: {missing.size} bytes"
        surplus = np.setdiff1d(reported, touched)
        if chip.grid is not None and kind == LOAD:
            surplus = np.setdiff1d(surplus, reported_bytes(idle_loads(mine_with(ops, index))))
        assert not surplus.size, f"{who}: {surplus.size} bytes reported but not touched"


def mine_with(ops, index: int):
    """Operations on one operand, and all that compute."""
    return ops[(ops["tensor"] == index) | (ops["kind"] == MATRIX)]


def check_launch(launch: Launch, chip: Chip, arrays: dict, rng: random.Random) -> None:
    """Runs a launch on tracking arrays and checks each block; `arrays` hold the results then."""
    likely = dtype_bytes(launch.dtype)
    for block in range(launch.blocks):
        tracked = {name: Tracked(array) for name, array in arrays.items()}
        ops, done = emit(launch, block, 0, max(launch.steps, 1), tensors_of(launch, tracked))
        assert done, f"block {block} is not done after {launch.steps} steps"
        for index, operand in enumerate(launch.operands):
            if operand.size_bytes and operand.name != "local":  # nothing computes with spills
                check_operand(index, operand, tracked[operand.name], ops, chip, likely)
        named = {operand.name for operand in launch.operands if operand.size_bytes}
        for name in tracked.keys() - named:
            assert not tracked[name].read | tracked[name].written, f"{name} is no operand"
        cuts = sorted({rng.randint(1, max(launch.steps, 1)) for _ in range(rng.randint(0, 3))})
        for parts in ((), cuts):
            again = count(launch, block, parts)
            assert again.tobytes() == ops.tobytes(), f"block {block}: cut at {parts} it differs"


def check_kernel(
    name: str,
    problem: Problem,
    schedule: Schedule,
    profile: str,
    arrays: dict,
    unrounded: bool = True,
):
    """All launches of a kernel, one after the other; gives the arrays after the last."""
    chip = load_profile(profile)
    rng = random.Random(0)
    for launch in load_kernel(name).launches(problem, schedule, chip):
        check_launch(exact(launch) if unrounded else launch, chip, arrays, rng)
    return arrays


@st.composite
def attention_problems(draw, longest: int = 24, longest_k: int = 24) -> Attention:
    """Small attention problems with every kind of mask and grouping, fully masked rows included."""
    kv_heads = draw(st.integers(1, 2))
    return Attention(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        seqlen=draw(st.integers(1, longest)),
        seqlen_k=draw(st.integers(1, longest_k)),
        head_dim=draw(st.sampled_from([1, 3, 8])),
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.sampled_from([0, 0, 1, 2, 5, 30])),
        dtype="bf16",
    )


def attention_arrays(problem: Attention, peak: float = 0.0) -> dict:
    """Random Q, K, V and room for what the attention kernels write; logits up to ±`peak`."""
    rng = np.random.default_rng(problem.seqlen * 1000 + problem.seqlen_k)
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    q = rng.standard_normal((heads, problem.seqlen, problem.head_dim))
    k, v = rng.standard_normal((2, kv_heads, problem.seqlen_k, problem.head_dim))
    if peak:
        logits = reference.scores(q, k, problem)
        q *= peak / max(1e-9, np.abs(logits[np.isfinite(logits)]).max(initial=0.0))
    return {
        "Q": q,
        "K": k,
        "V": v,
        "O": np.zeros_like(q),
        "lse": np.zeros((heads, problem.seqlen)),
        "l": np.zeros((heads, problem.seqlen)),
        "m": np.full((heads, problem.seqlen), -np.inf),
        "S": np.zeros((heads, problem.seqlen, problem.seqlen_k)),
        "P": np.zeros((heads, problem.seqlen, problem.seqlen_k)),
    }


class Tracer:
    """`check_kernel` in a process of its own, where nothing is compiled."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "NUMBA_DISABLE_JIT": "1", "PYTHONPATH": path},
        )

    def __call__(
        self, name: str, problem: Problem, schedule: Schedule, profile: str, arrays: dict
    ) -> dict:
        """The arrays after the run. Raises AssertionError with what was wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send(self._process.stdin, (name, problem, schedule, profile, arrays))
        result, error = receive(self._process.stdout)
        assert not error, error
        return result

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def send(pipe, value) -> None:
    """One pickled value, its length first."""
    data = pickle.dumps(value)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def receive(pipe):
    """What `send` sent. Raises EOFError at the end."""
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(pipe.read(struct.unpack("<q", head)[0]))


def serve() -> None:
    """The tracer's process: answers until its input ends."""
    import traceback

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    while True:
        try:
            request = receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            send(answers, (check_kernel(*request), None))
        except Exception:  # noqa: BLE001 - the test gets it
            send(answers, (None, traceback.format_exc()))


if __name__ == "__main__":
    serve()
