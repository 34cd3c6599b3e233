"""The packed state of resident blocks: their columns, the heap of agents, blocks in and out.

A slot holds one resident block. Its integers and floats are rows of two arrays, its operations a
row of a third; agent 2·slot issues loads, agent 2·slot + 1 does everything else.
"""

from __future__ import annotations

from iosim.jit import inline, jit
from iosim.memory.hierarchy import RESIDENT
from iosim.ops import LOCAL

# integer columns of a resident block
CORE, COUNT, MORE, LOADED, COMPUTED, STARTED, BLOCKED, RANDOM = range(8)
INT_COLUMNS = 8
# float columns; from ARRIVALS on: when the loads up to each position had arrived
TIME, READY, SPEED, LAST_ARRIVAL, LOAD_KEY, COMPUTE_KEY = range(6)
ARRIVALS = 6
# bits of BLOCKED
LOAD_AT_GATE, COMPUTE_AT_LOAD, LOADS_DRY = 1, 2, 4


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


@jit
def open_slot(heap, blocks_f, blocks_i, servers, slot, core, now, speed_and_random):
    """A block begins in `slot` at `now`, without operations yet; its compute agent is woken."""
    blocks_i[slot, :] = 0
    blocks_i[slot, CORE] = core
    blocks_i[slot, STARTED] = -1
    blocks_i[slot, BLOCKED] = LOADS_DRY
    blocks_i[slot, RANDOM] = int(speed_and_random[1])
    blocks_f[slot, :] = 0.0
    blocks_f[slot, TIME] = now
    blocks_f[slot, LOAD_KEY] = now
    blocks_f[slot, SPEED] = speed_and_random[0]
    servers[core, RESIDENT] += 1
    push(heap, 2 * slot + 1, now, blocks_f)


@jit
def make_room(blocks_f, blocks_i, ops, slot):
    """Drops the operations of a slot that are done; returns how many are left, at the front."""
    done = blocks_i[slot, COMPUTED]
    left = blocks_i[slot, COUNT] - done
    if done > 0:
        for i in range(left):
            ops[slot, i] = ops[slot, done + i]
            blocks_f[slot, ARRIVALS + i] = blocks_f[slot, ARRIVALS + done + i]
    blocks_i[slot, COMPUTED] = 0
    blocks_i[slot, LOADED] -= done
    return left


@jit
def settle_local(ops, count, shift_bytes):
    """Moves the local memory of new operations to where the resident block of this slot has it."""
    for i in range(count):
        if ops[i].flags & LOCAL:
            ops[i].address += shift_bytes


@jit
def refilled(heap, blocks_f, blocks_i, slot, count, more):
    """A slot holds `count` operations now; its load agent goes on if it had run dry."""
    blocks_i[slot, COUNT] = count
    blocks_i[slot, MORE] = more
    if blocks_i[slot, BLOCKED] & LOADS_DRY:
        blocks_i[slot, BLOCKED] &= ~LOADS_DRY
        push(heap, 2 * slot, blocks_f[slot, LOAD_KEY], blocks_f)
