"""What the engine reports of one launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from iosim.traffic import OperandTraffic, Traffic


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one launch moved, in total and per operand.

    `makespan_cycles` is when the last block ended on the engine's own clock; None where the
    machine has no model of time yet.
    """

    traffic: Traffic
    operands: Mapping[str, OperandTraffic]
    makespan_cycles: float | None
