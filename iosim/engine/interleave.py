"""The jitted loop of the engine: resident blocks interleaved in time.

A resident block is two agents that share its list of operations. The load agent issues the loads
of a step once the step `stages` - 1 before it has ended, as a software-pipelined loop does at the
end of its body (has begun its last operation, if that is an asynchronous product); with one stage
it waits until the compute agent reaches the load. The compute agent takes operations in program
order, waits for the data of the loads before them, and performs the stores. A heap holds the agents
by time, so that all memory accesses happen in time order.

`advance` returns when a block's buffer runs dry or the block ends: the caller refills or replaces.
"""

from __future__ import annotations

import math

from iosim.cost import op_cycles
from iosim.engine.slots import (
    ARRIVALS,
    BLOCKED,
    COMPUTE_AT_LOAD,
    COMPUTE_KEY,
    COMPUTED,
    CORE,
    COUNT,
    LAST_ARRIVAL,
    LOAD_AT_GATE,
    LOAD_KEY,
    LOADED,
    LOADS_DRY,
    MORE,
    RANDOM,
    READY,
    SPEED,
    STARTED,
    TIME,
    delay,
    pop,
    push,
)
from iosim.jit import inline, jit
from iosim.memory.hierarchy import RESIDENT, load_box, store_box
from iosim.ops import ASYNC, BARRIER, EXP, LOAD, LOCAL, MATRIX

# what `advance` returns besides the slot
IDLE, REFILL, DONE = range(3)


@inline
def may_load(slot, op, blocks_i, model):
    """Whether the next load may be issued now: its step is near enough, or the program is there."""
    if model.stages > 1:
        return op.step - (model.stages - 1) <= blocks_i[slot, STARTED]
    return blocks_i[slot, COMPUTED] == blocks_i[slot, LOADED]


@inline
def runs_ahead(op):
    """Whether the load agent issues this operation: loads, but for those of local memory.

    A spilled register is loaded where the program needs it, by the compute agent.
    """
    return op.kind == LOAD and not op.flags & LOCAL


@inline
def next_load(slot, ops, blocks_i):
    """Moves the load agent to the next load of the buffer; False where there is none."""
    at = blocks_i[slot, LOADED]
    count = blocks_i[slot, COUNT]
    while at < count and not runs_ahead(ops[slot, at]):
        at += 1
    blocks_i[slot, LOADED] = at
    return at < count


@inline
def wake_loads(slot, now, heap, ops, blocks_f, blocks_i, model):
    """Lets the load agent go on if it waited for what the compute agent just did."""
    waits = blocks_i[slot, BLOCKED] & LOAD_AT_GATE
    if waits and may_load(slot, ops[slot, blocks_i[slot, LOADED]], blocks_i, model):
        blocks_i[slot, BLOCKED] &= ~LOAD_AT_GATE
        push(heap, 2 * slot, now, blocks_f)


@inline
def do_load(heap, blocks_f, blocks_i, ops, caches, servers, tally, model):
    """The load agent at the top of the heap acts; True where its buffer has run dry."""
    slot = heap[1] >> 1
    now = blocks_f[slot, LOAD_KEY]
    if not next_load(slot, ops, blocks_i):
        blocks_i[slot, BLOCKED] |= LOADS_DRY
        pop(heap, blocks_f)
        return blocks_i[slot, MORE] != 0
    at = blocks_i[slot, LOADED]
    op = ops[slot, at]
    if not may_load(slot, op, blocks_i, model):
        blocks_i[slot, BLOCKED] |= LOAD_AT_GATE
        pop(heap, blocks_f)
        return False
    arrival = load_box(caches, op, blocks_i[slot, CORE], now, servers, tally, model)
    arrival = now + (arrival - now) * blocks_f[slot, SPEED]
    arrival = max(arrival, blocks_f[slot, LAST_ARRIVAL])
    blocks_f[slot, LAST_ARRIVAL] = arrival
    blocks_f[slot, ARRIVALS + at] = arrival
    blocks_i[slot, LOADED] = at + 1
    if blocks_i[slot, BLOCKED] & COMPUTE_AT_LOAD:
        blocks_i[slot, BLOCKED] &= ~COMPUTE_AT_LOAD
        push(heap, 2 * slot + 1, max(now, blocks_f[slot, TIME]), blocks_f)
    return False


@inline
def draw(slot, blocks_i):
    """The next random number of a block: mean 0, variance 1, uniform (a linear congruence)."""
    state = (blocks_i[slot, RANDOM] * 1103515245 + 12345) & 0x7FFFFFFF
    blocks_i[slot, RANDOM] = state
    return (state / 2147483648.0 - 0.5) * 3.4641016151377544


@inline
def ends_step(slot, at, ops, blocks_i):
    """Whether the operation at `at` is the last one of its step besides loads."""
    step = ops[slot, at].step
    after = at + 1
    while after < blocks_i[slot, COUNT] and runs_ahead(ops[slot, after]):
        after += 1
    return after == blocks_i[slot, COUNT] or ops[slot, after].step != step


@inline
def do_compute(heap, blocks_f, blocks_i, ops, caches, servers, tally, model):
    """The compute agent at the top of the heap acts once: IDLE, REFILL or DONE."""
    agent = heap[1]
    slot = agent >> 1
    now = blocks_f[slot, COMPUTE_KEY]
    at = blocks_i[slot, COMPUTED]
    while at < blocks_i[slot, COUNT] and runs_ahead(ops[slot, at]):
        if blocks_i[slot, LOADED] <= at:
            blocks_i[slot, COMPUTED] = at
            blocks_i[slot, BLOCKED] |= COMPUTE_AT_LOAD
            pop(heap, blocks_f)
            wake_loads(slot, now, heap, ops, blocks_f, blocks_i, model)
            return IDLE
        blocks_f[slot, READY] = blocks_f[slot, ARRIVALS + at]
        at += 1
    blocks_i[slot, COMPUTED] = at
    if at == blocks_i[slot, COUNT]:
        if blocks_i[slot, MORE]:
            return REFILL
        end = max(blocks_f[slot, TIME], blocks_f[slot, READY])
        if end > now:
            delay(heap, agent, end, blocks_f)
            return IDLE
        pop(heap, blocks_f)
        return DONE
    op = ops[slot, at]
    start = blocks_f[slot, TIME]
    if op.waits >= 0 or op.kind == BARRIER:
        start = max(start, blocks_f[slot, READY])
    if start > now:
        delay(heap, agent, start, blocks_f)
        return IDLE
    core = blocks_i[slot, CORE]
    if op.kind >= MATRIX:
        cycles = op_cycles(op.kind, op.m, op.n, op.k, model)
        after = at + 1
        if op.kind != MATRIX and after < blocks_i[slot, COUNT] and ops[slot, after].kind == EXP:
            beside = ops[slot, after]
            cycles = max(cycles, op_cycles(EXP, beside.m, beside.n, beside.k, model))
            at = after
        cycles *= servers[core, RESIDENT] * blocks_f[slot, SPEED]
        end = now + max(0.0, cycles + draw(slot, blocks_i) * math.sqrt(model.jitter * cycles))
    elif op.kind == LOAD:
        end = load_box(caches, op, core, now, servers, tally, model)
    else:
        end = store_box(caches, op, core, now, servers, tally, model)
    blocks_f[slot, TIME] = end
    blocks_i[slot, COMPUTED] = at + 1
    delay(heap, agent, end, blocks_f)
    if model.stages > 1 and ends_step(slot, at, ops, blocks_i):
        blocks_i[slot, STARTED] = op.step
        opens = now if op.flags & ASYNC else end
        wake_loads(slot, opens, heap, ops, blocks_f, blocks_i, model)
    return IDLE


@jit
def advance(heap, blocks_f, blocks_i, ops, caches, servers, tally, model):
    """Runs until a block needs the caller: (REFILL or DONE, slot), or (IDLE, -1) at the end."""
    while heap[0] > 0:
        agent = heap[1]
        if agent & 1:
            what = do_compute(heap, blocks_f, blocks_i, ops, caches, servers, tally, model)
            if what != IDLE:
                return what, agent >> 1
        elif do_load(heap, blocks_f, blocks_i, ops, caches, servers, tally, model):
            return REFILL, agent >> 1
    return IDLE, -1
