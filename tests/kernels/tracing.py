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

from iosim.chip import Chip
from iosim.kernels import load_kernel
from iosim.launch import Launch
from iosim.memory.layout import matrix
from iosim.ops import ATOMIC, EXP, LOAD, MATRIX, MULTICAST, OP_DTYPE, STORE, VECTOR, WINDOW
from iosim.problem import Problem, Schedule
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


def assert_work(launch: Launch, blocks: list) -> None:
    """`issued_*` are the sums over the operations of all blocks, and hold what is asked for."""
    ops = np.concatenate(blocks)
    amount = {
        kind: int((mine["m"].astype(np.int64) * mine["n"] * mine["k"]).sum())
        for kind in (MATRIX, EXP, VECTOR)
        for mine in [ops[ops["kind"] == kind]]
    }
    work = launch.work
    found = {"flops": 2 * amount[MATRIX], "exps": amount[EXP], "vector_ops": amount[VECTOR]}
    for name, value in found.items():
        issued = getattr(work, f"issued_{name}")
        assert issued == value, f"{launch.name}: issued_{name} {issued}, not {value}"
    assert work.flops <= work.issued_flops, launch.name
    assert work.exps <= work.issued_exps, launch.name


def assert_ranges(launch: Launch, blocks: list, cuts=()) -> None:
    """The counting version gives the operations of `blocks`, in whatever ranges it is asked for."""
    for block, ops in enumerate(blocks):
        edges = sorted({cut % max(launch.steps, 1) for cut in cuts} - {0})
        again = count(launch, block, edges)
        assert again.tobytes() == ops.tobytes(), f"block {block}: cut at {edges} it differs"


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
    added = check_additions(operand, mine, tracked, lies)
    for kind, ids in ((LOAD, tracked.read), (STORE, tracked.written)):
        touched = touched_bytes(ids, *lies)
        boxes = mine[mine["kind"] == kind]
        reported = reported_bytes(boxes)
        who = f"{operand.name}, {'read' if kind == LOAD else 'written'}"
        inside = (reported >= operand.address) & (reported < operand.address + operand.size_bytes)
        assert inside.all(), f"{who}: an operation reaches outside the operand"
        if chip.grid is not None:
            reported = np.intersect1d(reported, everything)  # the rest is padding
        missing = np.setdiff1d(touched, np.union1d(reported, added))
        assert not missing.size, f"{who} but not reported: {missing.size} bytes"
        surplus = np.setdiff1d(reported, touched)
        if chip.grid is not None and kind == LOAD:
            surplus = np.setdiff1d(surplus, reported_bytes(idle_loads(mine_with(ops, index))))
        assert not surplus.size, f"{who}: {surplus.size} bytes reported but not touched"


def check_additions(operand, mine, tracked, lies) -> np.ndarray:
    """The bytes that one block adds to: it reads and writes them, and reports them only as that."""
    added = reported_bytes(mine[mine["kind"] == ATOMIC])
    for ids, how in ((tracked.read, "read"), (tracked.written, "written")):
        surplus = np.setdiff1d(added, touched_bytes(ids, *lies))
        assert not surplus.size, f"{operand.name}: {surplus.size} bytes added to but not {how}"
    twice = np.intersect1d(added, reported_bytes(mine[np.isin(mine["kind"], (LOAD, STORE))]))
    assert not twice.size, f"{operand.name}: {twice.size} bytes added to and moved besides"
    return added


def mine_with(ops, index: int):
    """Operations on one operand, and all that compute."""
    return ops[(ops["tensor"] == index) | (ops["kind"] == MATRIX)]


def check_launch(launch: Launch, chip: Chip, arrays: dict, rng: random.Random) -> None:
    """Runs a launch on tracking arrays and checks each block; `arrays` hold the results then.

    A block of a cluster touches what it loads by itself and what any block there multicasts.
    """
    for first in range(0, launch.blocks, launch.cluster):
        cluster = [run_tracked(launch, first + i, arrays) for i in range(launch.cluster)]
        shared = shared_loads(launch, [ops for ops, _ in cluster])
        for i, (ops, tracked) in enumerate(cluster):
            mine = np.concatenate([ops[~multicasts(ops)], shared])
            check_block(launch, chip, mine, tracked)
            cuts = sorted({rng.randint(1, max(launch.steps, 1)) for _ in range(rng.randint(0, 3))})
            for parts in ((), cuts):
                again = count(launch, first + i, parts)
                where = f"block {first + i}: cut at {parts} it differs"
                assert again.tobytes() == ops.tobytes(), where


def run_tracked(launch: Launch, block: int, arrays: dict) -> tuple[np.ndarray, dict]:
    """All operations of a block, and the arrays with what it touched of them."""
    tracked = {name: Tracked(array) for name, array in arrays.items()}
    ops, done = emit(launch, block, 0, max(launch.steps, 1), tensors_of(launch, tracked))
    assert done, f"block {block} is not done after {launch.steps} steps"
    return ops, tracked


def multicasts(ops) -> np.ndarray:
    """Which operations are loads that a whole cluster receives."""
    return (ops["kind"] == LOAD) & (ops["flags"] & MULTICAST != 0)


def shared_loads(launch: Launch, cluster: list) -> np.ndarray:
    """What the blocks of a cluster multicast; in one step no byte is asked for twice."""
    loads = np.concatenate([ops[multicasts(ops)] for ops in cluster])
    assert (loads["slot"] == launch.cluster).all(), "a multicast that not all of a cluster receive"
    for index in np.unique(loads["tensor"]):
        for step in np.unique(loads["step"]):
            boxes = loads[(loads["tensor"] == index) & (loads["step"] == step)]
            asked = int((boxes["rows"].astype(np.int64) * boxes["row_bytes"]).sum())
            # two tiles of one operand in a step are apart as well
            assert reported_bytes(boxes).size == asked, f"step {step}: bytes multicast twice"
    return loads


def check_block(launch: Launch, chip: Chip, ops, tracked: dict) -> None:
    """What one block touched against what reaches it."""
    likely = dtype_bytes(launch.dtype)
    for index, operand in enumerate(launch.operands):
        if operand.size_bytes and operand.name != "local":  # nothing computes with spills
            check_operand(index, operand, tracked[operand.name], ops, chip, likely)
    named = {operand.name for operand in launch.operands if operand.size_bytes}
    for name in tracked.keys() - named:
        assert not tracked[name].read | tracked[name].written, f"{name} is no operand"


def check_kernel(
    name: str,
    problem: Problem,
    schedule: Schedule,
    profile: str | Chip,
    arrays: dict,
    unrounded: bool = True,
):
    """All launches of a kernel, one after the other; gives the arrays after the last.

    `profile` is the name of a chip, or one that a test has made.
    """
    chip = profile if isinstance(profile, Chip) else load_profile(profile)
    rng = random.Random(0)
    for launch in load_kernel(name).launches(problem, schedule, chip):
        check_launch(exact(launch) if unrounded else launch, chip, arrays, rng)
    return arrays


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
        self, name: str, problem: Problem, schedule: Schedule, profile: str | Chip, arrays: dict
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
