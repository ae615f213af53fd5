"""Random numbers for compiled code: the Mersenne Twister, as numpy's `RandomState` draws them from the same seed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from optpipe_compiler.machine.compiled import compiled

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import Row

NUMBERS, FAR = 624, 397
"""Of the generator: numbers of 32 bits that it makes at once, and how far apart two are that make a third."""
NEXT, IS_KEPT, KEPT, OTHER = 624, 625, 626, 627
"""Places behind the numbers: of the next one to draw; whether there is a second normal number, and its two draws."""
WORDS = 628
BITS = 0xFFFFFFFF


@compiled
def seeded(state: Row, seed: int) -> None:
    """Begin anew."""
    state[0] = seed & BITS
    for place in range(1, NUMBERS):
        before = state[place - 1]
        state[place] = (1812433253 * (before ^ (before >> 30)) + place) & BITS
    state[NEXT], state[IS_KEPT] = NUMBERS, 0


@compiled
def _drawn(state: Row) -> int:
    """Return 32 random bits."""
    if state[NEXT] == NUMBERS:
        for place in range(NUMBERS):
            both = (state[place] & 0x80000000) | (state[(place + 1) % NUMBERS] & 0x7FFFFFFF)
            state[place] = state[(place + FAR) % NUMBERS] ^ (both >> 1) ^ (0x9908B0DF if both & 1 else 0)
        state[NEXT] = 0
    found = int(state[state[NEXT]])
    state[NEXT] += 1
    found ^= found >> 11
    found ^= (found << 7) & 0x9D2C5680
    found ^= (found << 15) & 0xEFC60000
    return found ^ (found >> 18)


@compiled
def _long(state: Row) -> int:
    """Return 53 random bits."""
    high = _drawn(state) >> 5
    return (high << 26) + (_drawn(state) >> 6)


@compiled
def uniform(state: Row) -> float:
    """Return a number from 0 on and below 1."""
    return _long(state) / 9007199254740992.0


@compiled
def below(state: Row, end: int) -> int:
    """Return one of the numbers from 0 on and below `end`, which is at most 2^32."""
    if end == 1:
        return 0
    mask = end - 1
    mask |= mask >> 1
    mask |= mask >> 2
    mask |= mask >> 4
    mask |= mask >> 8
    mask |= mask >> 16
    found = end
    while found >= end:
        found = _drawn(state) & mask
    return found


@compiled
def _centred(bits: int) -> float:
    """Return a number from -1 on and below 1."""
    return bits / 4503599627370496.0 - 1.0


@compiled
def normal(state: Row) -> float:
    """Return a number of the normal distribution; they are drawn in pairs."""
    if state[IS_KEPT]:
        state[IS_KEPT] = 0
        kept = _centred(state[KEPT])
        other = _centred(state[OTHER])
        square = kept * kept + other * other
        return kept * math.sqrt(-2.0 * math.log(square) / square)
    square = 2.0
    kept = other = 0.0
    while square >= 1.0 or square == 0.0:
        state[KEPT] = _long(state)
        state[OTHER] = _long(state)
        kept = _centred(state[KEPT])
        other = _centred(state[OTHER])
        square = kept * kept + other * other
    state[IS_KEPT] = 1
    return other * math.sqrt(-2.0 * math.log(square) / square)
