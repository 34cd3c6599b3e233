"""The jitted loop of the engine: resident blocks interleaved in time.

A resident block is two agents that share its list of operations. The load agent runs ahead of the
compute agent by up to `stages` - 1 steps, as a software-pipelined loop does; with one stage it
waits until the compute agent reaches the load. The compute agent takes operations in program
order, waits for the data of the loads before them and for the core, and performs the
stores. A heap holds the agents by time, so that all memory accesses happen in time order.

`advance` returns when a block's buffer runs dry or the block ends: the caller refills or replaces.
"""

from __future__ import annotations

from iosim.cost import op_cycles
from iosim.jit import inline, jit
from iosim.memory.hierarchy import RESIDENT, load_box, store_box
from iosim.ops import BARRIER, EXP, LOAD, MATRIX

# integer columns of a resident block
CORE, COUNT, MORE, LOADED, COMPUTED, STARTED, BLOCKED = range(7)
INT_COLUMNS = 8
# float columns; from ARRIVALS on: when the loads up to each position had arrived
TIME, READY, SPEED, LAST_ARRIVAL, LOAD_KEY, COMPUTE_KEY = range(6)
ARRIVALS = 6
# bits of BLOCKED
LOAD_AT_GATE, COMPUTE_AT_LOAD, LOADS_DRY = 1, 2, 4
# what `advance` returns besides the slot
IDLE, REFILL, DONE = range(3)


@inline
def key_of(agent, blocks_f):
    """When an agent (2·slot: loads, 2·slot + 1: compute) acts next."""
    return blocks_f[agent >> 1, LOAD_KEY + (agent & 1)]


@inline
def push(heap, agent, key, blocks_f):
    """Adds an agent at time `key`; heap[0] is the number of agents in it."""
    blocks_f[agent >> 1, LOAD_KEY + (agent & 1)] = key
    heap[0] += 1
    i = heap[0]
    while i > 1 and key_of(heap[i >> 1], blocks_f) > key:
        heap[i] = heap[i >> 1]
        i >>= 1
    heap[i] = agent


@inline
def pop(heap, blocks_f):
    """Removes the earliest agent (the top)."""
    last = heap[heap[0]]
    heap[0] -= 1
    if heap[0] > 0:
        sift(heap, last, key_of(last, blocks_f), blocks_f)


@inline
def delay(heap, agent, key, blocks_f):
    """Gives the agent at the top a later time."""
    blocks_f[agent >> 1, LOAD_KEY + (agent & 1)] = key
    sift(heap, agent, key, blocks_f)


@inline
def sift(heap, agent, key, blocks_f):
    """Puts `agent` into its place, from the top down."""
    size = heap[0]
    i = 1
    while 2 * i <= size:
        child = 2 * i
        if child < size and key_of(heap[child + 1], blocks_f) < key_of(heap[child], blocks_f):
            child += 1
        if key_of(heap[child], blocks_f) >= key:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = agent


@inline
def may_load(slot, op, blocks_i, model):
    """Whether the next load may be issued now: its step is near enough, or the program is there."""
    if model.stages > 1:
        return op.step - (model.stages - 1) <= blocks_i[slot, STARTED]
    return blocks_i[slot, COMPUTED] == blocks_i[slot, LOADED]


@inline
def next_load(slot, ops, blocks_i):
    """Moves the load agent to the next load of the buffer; False where there is none."""
    at = blocks_i[slot, LOADED]
    count = blocks_i[slot, COUNT]
    while at < count and ops[slot, at].kind != LOAD:
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
def ends_step(slot, at, ops, blocks_i):
    """Whether the operation at `at` is the last one of its step besides loads."""
    step = ops[slot, at].step
    after = at + 1
    while after < blocks_i[slot, COUNT] and ops[slot, after].kind == LOAD:
        after += 1
    return after == blocks_i[slot, COUNT] or ops[slot, after].step != step


@inline
def do_compute(heap, blocks_f, blocks_i, ops, caches, servers, tally, model):
    """The compute agent at the top of the heap acts once: IDLE, REFILL or DONE."""
    agent = heap[1]
    slot = agent >> 1
    now = blocks_f[slot, COMPUTE_KEY]
    at = blocks_i[slot, COMPUTED]
    while at < blocks_i[slot, COUNT] and ops[slot, at].kind == LOAD:
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
        end = now + cycles * servers[core, RESIDENT] * blocks_f[slot, SPEED]
    else:
        end = store_box(caches, op, core, now, servers, tally, model)
    blocks_f[slot, TIME] = end
    blocks_i[slot, COMPUTED] = at + 1
    delay(heap, agent, end, blocks_f)
    if model.stages > 1 and ends_step(slot, at, ops, blocks_i):
        blocks_i[slot, STARTED] = op.step
        wake_loads(slot, end, heap, ops, blocks_f, blocks_i, model)
    return IDLE


@jit
def add_agent(heap, agent, key, blocks_f):
    """`push` for the caller outside."""
    push(heap, agent, key, blocks_f)


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
