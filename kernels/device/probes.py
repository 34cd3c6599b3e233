"""Microbenchmarks of one GPU in Triton: one kernel per question, none of them an attention or GEMM.

Every probe that times itself writes five 64-bit numbers per program: begin and end on the chip's
global timer (ns), begin and end on the core's clock (cycles), and the core it ran on. Import needs
Triton.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer, smid

SLOTS = 5


@triton.jit
def cycles(after):
    """The core's clock once `after` (an int32) is there: a branch, never taken, waits for it."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred q; setp.eq.s32 q, $1, -1; @q trap; mov.u64 $0, %clock64; }",
        "=l,r",
        [after],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def note(T, pid, begin_ns, begin, end_after):
    """Writes the row of this program."""
    end = cycles(end_after)
    end_ns = globaltimer()
    tl.store(T + pid * 5, begin_ns)
    tl.store(T + pid * 5 + 1, end_ns)
    tl.store(T + pid * 5 + 2, begin)
    tl.store(T + pid * 5 + 3, end)
    tl.store(T + pid * 5 + 4, smid().to(tl.int64))


@triton.jit
def chase(NEXT, T, TOOK, X, start, steps, rounds, wrap, MODE: tl.constexpr, BLOCK: tl.constexpr):
    """Program 0 follows a chain of dependent loads; the others stream `wrap` blocks of X meanwhile.

    MODE 0 loads nothing (what two readings of the clock cost), 1 loads through L1, 2 past it.
    """
    pid = tl.program_id(0)
    if pid == 0:
        p = start
        for i in range(steps):
            begin = cycles(p)
            if MODE == 1:
                p = tl.load(NEXT + p, cache_modifier=".ca")
            if MODE == 2:
                p = tl.load(NEXT + p, cache_modifier=".cg")
            end = cycles(p)
            tl.store(TOOK + i, (end - begin).to(tl.int32))
        tl.store(T, p.to(tl.int64))
    else:
        acc = tl.zeros((BLOCK,), dtype=tl.float32)
        n = tl.num_programs(0) - 1
        for s in range(rounds):
            at = ((s * n + pid - 1) % wrap).to(tl.int64) * BLOCK
            acc += tl.load(X + at + tl.arange(0, BLOCK), cache_modifier=".cg").to(tl.float32)
        tl.store(T + 8 + pid, tl.sum(acc).to(tl.int64))


@triton.jit
def read(X, Y, T, span, steps, own, BLOCK: tl.constexpr):
    """Streams past L1: `steps` blocks of elements from a buffer of `span`, again and again.

    `own`: programs go round the buffer together, each with its own block, so that all of it is
    read; else every program starts at its own place and reads all of it.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    begin_ns = globaltimer()
    begin = cycles(pid)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for s in range(steps):
        where = tl.where(
            own != 0, tl.cast(s, tl.int64) * programs + pid, tl.cast(s, tl.int64) + pid * 37
        )
        at = (where * BLOCK) % span
        acc += tl.load(X + at + tl.arange(0, BLOCK), cache_modifier=".cg").to(tl.float32)
    total = tl.sum(acc)
    note(T, pid, begin_ns, begin, (total > 0).to(tl.int32))
    tl.store(Y + pid, total)


@triton.jit
def private(X, Y, T, span, reps, BLOCK: tl.constexpr):
    """Every program reads its own `span` elements through L1, `reps` times."""
    pid = tl.program_id(0)
    base = pid.to(tl.int64) * span
    begin_ns = globaltimer()
    begin = cycles(pid)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(reps):
        for off in range(0, span, BLOCK):
            acc += tl.load(X + base + off + tl.arange(0, BLOCK)).to(tl.float32)
    total = tl.sum(acc)
    note(T, pid, begin_ns, begin, (total > 0).to(tl.int32))
    tl.store(Y + pid, total)


@triton.jit
def mixed(X, Y, n, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):
    """A block of elements per program: `READS` streams are read, `WRITES` streams written."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.zeros((BLOCK,), dtype=tl.float32)
    for r in tl.static_range(READS):
        value += tl.load(X + r * n + at).to(tl.float32)
    for w in tl.static_range(WRITES):
        tl.store(Y + w * n + at, value.to(Y.dtype.element_ty))
    if WRITES == 0:  # never true, and the reads must not be left out
        tl.store(Y + at, value.to(Y.dtype.element_ty), mask=tl.sum(value) == -1.0)


@triton.jit
def stored_then_read(X, Y, reps, BLOCK: tl.constexpr):
    """Writes a block and reads it again `reps` times: does a store leave its line in L1?"""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(X + at, tl.full((BLOCK,), 1.0, X.dtype.element_ty))
    tl.debug_barrier()
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(reps):
        acc += tl.load(X + at).to(tl.float32)
    tl.store(Y + tl.program_id(0), tl.sum(acc))


@triton.jit
def products(X, Y, T, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Products of two tiles that stay on chip, each added to the same sum."""
    pid = tl.program_id(0)
    a = tl.load(X + tl.arange(0, BM)[:, None] * BK + tl.arange(0, BK)[None, :])
    b = tl.load(X + tl.arange(0, BK)[:, None] * BN + tl.arange(0, BN)[None, :])
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    begin_ns = globaltimer()
    begin = cycles(pid)
    for _ in range(steps):
        acc = tl.dot(a, b, acc)
    total = tl.sum(acc)
    note(T, pid, begin_ns, begin, (total > 0).to(tl.int32))
    tl.store(Y + pid, total)


@triton.jit
def exponentials(X, Y, T, steps, BLOCK: tl.constexpr):
    """Exponentials of numbers in registers."""
    pid = tl.program_id(0)
    x = tl.load(X + tl.arange(0, BLOCK)).to(tl.float32)
    begin_ns = globaltimer()
    begin = cycles(pid)
    for _ in range(steps):
        x = tl.exp2(x)
    total = tl.sum(x)
    note(T, pid, begin_ns, begin, (total > 0).to(tl.int32))
    tl.store(Y + pid, total)


@triton.jit
def additions(X, Y, T, steps, BLOCK: tl.constexpr):
    """Multiply-adds of fp32 numbers in registers, one instruction per element and step."""
    pid = tl.program_id(0)
    x = tl.load(X + tl.arange(0, BLOCK)).to(tl.float32)
    y = x * 0.5
    begin_ns = globaltimer()
    begin = cycles(pid)
    for _ in range(steps):
        x = x * y + y
    total = tl.sum(x)
    note(T, pid, begin_ns, begin, (total > 0).to(tl.int32))
    tl.store(Y + pid, total)


@triton.jit
def units(
    X,
    Y,
    T,
    steps,
    EXPS: tl.constexpr,
    ADDS: tl.constexpr,
    WAIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A product, then exponentials and additions: what do the units of a core do at a time?

    WAIT: the exponentials are of the product's own result, so that they must wait for it.
    """
    pid = tl.program_id(0)
    a = tl.load(X + tl.arange(0, BM)[:, None] * BK + tl.arange(0, BK)[None, :])
    b = tl.load(X + tl.arange(0, BK)[:, None] * BN + tl.arange(0, BN)[None, :])
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    side = tl.zeros((BM, BN), dtype=tl.float32) + tl.program_id(0)
    begin_ns = globaltimer()
    begin = cycles(pid)
    for _ in range(steps):
        if WAIT:
            side = tl.dot(a, b)
        else:
            acc = tl.dot(a, b, acc)
        for _e in tl.static_range(EXPS):
            side = tl.exp2(side)
        for _a in tl.static_range(ADDS):
            side = side * side + 0.25
        if WAIT:
            acc = acc * 0.5 + side
    total = tl.sum(acc) + tl.sum(side)
    note(T, pid, begin_ns, begin, (total > 0).to(tl.int32))
    tl.store(Y + pid, total)


@triton.jit
def stream(
    X,
    Y,
    T,
    steps,
    span,
    shared,
    DOT: tl.constexpr,
    WAIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Tiles of a buffer again and again, with products or without.

    Each program goes through its own `span` elements (`shared`: all through the same). What its
    products cost in power, how fast equal blocks are, and how far loads run ahead show here.
    """
    pid = tl.program_id(0)
    om = tl.arange(0, BM)
    on = tl.arange(0, BN)
    ok = tl.arange(0, BK)
    base = tl.where(shared != 0, 0, pid).to(tl.int64) * span
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    begin_ns = globaltimer()
    begin = cycles(pid)
    for s in range(steps):
        off = tl.multiple_of(base + (s * ((BM + BN) * BK)) % span, 64)  # else no loads run ahead
        a = tl.load(X + off + om[:, None] * BK + ok[None, :])
        b = tl.load(X + off + BM * BK + ok[:, None] * BN + on[None, :])
        if WAIT:
            acc = acc * 0.5 + tl.exp2(tl.dot(a, b))
        elif DOT:
            acc += tl.dot(a, b)
        else:
            acc += tl.sum(a.to(tl.float32)) + tl.sum(b.to(tl.float32))
    total = tl.sum(acc)
    note(T, pid, begin_ns, begin, (total > 0).to(tl.int32))
    tl.store(Y + pid, total)


@triton.jit
def empty(Y):
    """Nothing: what a block costs by itself."""
    if tl.program_id(0) < 0:
        tl.store(Y, 1.0)
