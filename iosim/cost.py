"""The one cost model: cycles that an operation occupies its unit of a core.

The engine reads it to know who runs when, the pipeline to know where the time goes.
"""

from __future__ import annotations

from iosim.chip import Chip
from iosim.jit import inline
from iosim.ops import EXP, MATRIX, VECTOR

#: cycles per operation of each unit; a product of fewer than `matrix_min_rows` rows is slower
UNITS = ("matrix_min_rows", "matrix_fast", "matrix_slow", "exp", "vector")


def unit_costs(chip: Chip, dtype: str) -> dict[str, float]:
    """Cycles per flop, exp and vector operation of one core of `chip`, by field of UNITS."""
    fast = chip.rate("matrix", dtype)
    slow = chip.rate("matrix", dtype, rows=1)
    return {
        "matrix_min_rows": fast.min_rows,
        "matrix_fast": 1 / fast.per_core_per_clock,
        "matrix_slow": 1 / slow.per_core_per_clock,
        "exp": 1 / chip.rate("exp", dtype).per_core_per_clock,
        "vector": 1 / chip.rate("vector", dtype).per_core_per_clock,
    }


@inline
def op_cycles(kind, m, n, k, costs):
    """Cycles of one compute operation; `costs` has the fields of UNITS."""
    work = float(m) * n * k
    if kind == MATRIX:
        per_flop = costs.matrix_fast if m >= costs.matrix_min_rows else costs.matrix_slow
        return 2.0 * work * per_flop
    if kind == EXP:
        return work * costs.exp
    if kind == VECTOR:
        return work * costs.vector
    return 0.0
