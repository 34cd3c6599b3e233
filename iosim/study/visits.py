"""Which tile of which operand the first blocks of a launch read and write, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iosim.chip import Chip
from iosim.errors import RequestError
from iosim.launch import Kernel, Launch
from iosim.ops import ATOMIC, LOAD, OP_DTYPE, STORE
from iosim.report.sketch import ADDED, BOTH, READ, WRITTEN, Calendar, Strip
from iosim.simulation import complete


def sketch(kernel: Kernel, chips: Iterable[Chip]) -> list[Calendar]:
    """The launches of a kernel's own small example, on the first of `chips` that can run it."""
    if kernel.sketch is None:
        return []
    problem, schedule = kernel.sketch
    for chip in chips:
        if chip.machine not in kernel.machines:
            continue
        try:
            planned = kernel.launches(problem, complete(kernel, problem, chip, schedule), chip)
        except RequestError:
            continue
        return [calendar(launch) for launch in planned]
    return []


def calendar(launch: Launch, columns: int = 24) -> Calendar:
    """What the first blocks do that fit into `columns` steps; the first one in any case."""
    blocks = [_operations(launch, block) for block in range(launch.blocks)]
    steps = [int(ops["step"].max(initial=0)) + 1 for ops in blocks]
    shown, used = 0, 0
    while shown < len(blocks) and (shown == 0 or used + steps[shown] <= columns):
        used += steps[shown]
        shown += 1
    strips = [
        _strip(name.name, [ops[ops["tensor"] == index] for ops in blocks], steps[:shown])
        for index, name in enumerate(launch.operands)
        if name.size_bytes
    ]
    return Calendar(
        launch=launch.name,
        blocks=launch.blocks,
        steps=tuple(steps[:shown]),
        strips=tuple(strip for strip in strips if strip.marks),
    )


def _operations(launch: Launch, block: int) -> NDArray[Any]:
    """The memory operations of one block."""
    room = launch.ops_per_step * max(1, launch.steps) + launch.ops_at_ends
    out = np.zeros(room, dtype=OP_DTYPE)
    count, _ = launch.program(block, 0, max(1, launch.steps), launch.params, out, None)
    ops = out[:count]
    return ops[np.isin(ops["kind"], (LOAD, STORE, ATOMIC))]


def _strip(operand: str, blocks: list[NDArray[Any]], steps: list[int]) -> Strip:
    addresses = np.unique(np.concatenate([ops["address"] for ops in blocks]))
    marks: dict[tuple[int, int], str] = {}
    begin = 0
    for ops, width in zip(blocks, steps, strict=False):
        for op in ops:
            where = (int(np.searchsorted(addresses, op["address"])), begin + int(op["step"]))
            marks[where] = _together(marks.get(where), int(op["kind"]))
        begin += width
    return Strip(operand=operand, tiles=len(addresses), marks=marks)


def _together(before: str | None, kind: int) -> str:
    now = {LOAD: READ, STORE: WRITTEN, ATOMIC: ADDED}[kind]
    return now if before in (None, now) else BOTH
