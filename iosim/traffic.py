"""Bytes moved: records that add with `+`, one per launch and per operand."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

#: which fields a machine has, in the order in which they are printed
GPU_FIELDS = (
    "dram_read_bytes",
    "dram_write_bytes",
    "dirty_left_bytes",
    "l1_fill_bytes",
    "l1_write_bytes",
    "l2_from_l1_bytes",
    "l2_fabric_bytes",
)
TPU_FIELDS = (
    "dram_read_bytes",
    "dram_write_bytes",
    "cmem_read_bytes",
    "cmem_write_bytes",
    "vmem_fill_bytes",
    "vmem_drain_bytes",
)
FIELDS = {"gpu": GPU_FIELDS, "tpu": TPU_FIELDS}


@dataclass(frozen=True, kw_only=True)
class _Sum:
    """A record of numbers that adds field by field."""

    def __add__(self, other: Self) -> Self:
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return type(self)(**both)


@dataclass(frozen=True, kw_only=True)
class Traffic(_Sum):
    """Bytes that crossed each level; names as in `counters`, and they mean what those mean.

    `dirty_left_bytes` is in the cache at the end and not in `dram_write_bytes`.
    """

    dram_read_bytes: int = 0
    dram_write_bytes: int = 0
    dirty_left_bytes: int = 0
    l1_fill_bytes: int = 0
    l1_write_bytes: int = 0
    l2_from_l1_bytes: int = 0
    l2_fabric_bytes: int = 0
    cmem_read_bytes: int = 0
    cmem_write_bytes: int = 0
    vmem_fill_bytes: int = 0
    vmem_drain_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class OperandTraffic(_Sum):
    """Bytes of one operand; `unique_bytes` counts every address once (compulsory).

    `fetches` counts windows that a grid fetched.
    """

    dram_read_bytes: int = 0
    dram_write_bytes: int = 0
    l1_fill_bytes: int = 0
    l1_write_bytes: int = 0
    l2_hit_bytes: int = 0
    vmem_fill_bytes: int = 0
    vmem_drain_bytes: int = 0
    fetches: int = 0
    unique_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Work(_Sum):
    """Arithmetic of a launch. `flops` and `exps` are asked for by the problem (masked pairs not
    counted); `issued_*` are what whole tiles execute."""

    flops: int = 0
    exps: int = 0
    issued_flops: int = 0
    issued_exps: int = 0
    issued_vector_ops: int = 0
