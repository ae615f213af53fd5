"""Compiled functions do what Python does with the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optpipe_compiler.machine.compiled import Library
from optpipe_compiler.machine.random import WORDS, below, normal, seeded, uniform
from optpipe_compiler.machine.translate import Unsupported

if TYPE_CHECKING:
    from optpipe_compiler.machine.state import Cube, Row, Table

LIBRARY = Library()
WIDTH = 4
LIMIT = 10**6
LARGE = st.integers(-LIMIT, LIMIT)


class Arrays(NamedTuple):
    line: Row
    table: Annotated[Table, WIDTH]
    cube: Cube


@LIBRARY.compiled
def both(one: int, other: int) -> tuple[int, int]:
    return other, one


@LIBRARY.compiled
def is_even(x: Arrays, number: int) -> bool:
    """Say so, and leave a trace: what need not be asked must not be."""
    x.line[0] += 1
    return number % 2 == 0


@LIBRARY.compiled
def fill(row: Row, first: int, last: int, value: int) -> None:
    row[first:last] = value


@LIBRARY.entry
def numbers(x: Arrays, a: int, b: int, is_odd: bool) -> tuple[int, int, int]:
    quotient, rest = divmod(a, b)
    a, b = both(a, b)
    if a == b or (a < b and not is_odd):
        kind = 7 if a > 0 else a
    elif 0 <= rest < 3 <= b:
        kind = -quotient
    else:
        kind = max(a, b, 0) // min(-1, a, b)
    half = (a + 1) / 2.5
    return quotient * 3 - rest, kind, int(half * (0.5 if is_odd else 2)) + (a & 0xFF ^ 3 | b << 2) + (a >> 3)


@LIBRARY.entry
def loops(x: Arrays, end: int, row: Row) -> int:
    count = found = 0
    while True:
        count += 1
        if count > end:
            break
        if count in (3, 5, end) or (is_even(x, count) and count % 3 == 0):
            continue
        for number in range(count, end):
            if number - count > WIDTH:
                break
            found += number
            x.cube[0, number % 2, 1] -= row[number % row.size] * found % 11
    one, two = x.cube.shape[1:]
    line = x.table[count % x.table.shape[0]]
    line[1] = line[2] = one + two
    fill(line, 0, 1, found)
    x.cube.flat[end % x.cube.size] = not x.line[0]
    x.cube[1, 1, :] = 0
    x.table[0, 1:3] = count
    has_more = end > 3 and is_even(x, end)
    return found if has_more or row[0] else count


def arrays(values: list[int]) -> Arrays:
    some = np.resize(np.array(values), 24).astype(np.int64)
    return Arrays(some[:3].copy(), some[:12].reshape(3, WIDTH).copy(), some.reshape(2, 3, 4).copy())


@settings(max_examples=200, deadline=None)
@given(LARGE, LARGE.filter(bool), st.booleans())
def test_numbers_are_pythons(a, b, is_odd):
    x = arrays([0])
    assert numbers(x, a, b, is_odd) == numbers.function(x, a, b, is_odd)


@settings(max_examples=200, deadline=None)
@given(st.lists(LARGE, min_size=1), st.integers(0, 30), st.lists(LARGE, min_size=1))
def test_loops_and_arrays_are_pythons(values, end, row):
    here, there, read = arrays(values), arrays(values), np.array(row)
    assert loops(here, end, read) == loops.function(there, end, read)
    for one, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(one, other)


def test_arrays_that_compiled_code_would_misread_are_refused():
    x = arrays([1])
    for wrong in (x._replace(table=np.zeros((3, 5), np.int64)), x._replace(line=np.zeros(3, np.int32))):
        with pytest.raises(TypeError, match="compiled code cannot read an array of int"):
            loops(wrong, 1, x.line)
    for row in (x.table, x.table[:, 0]):
        with pytest.raises(TypeError, match="compiled code cannot read an array of int64"):
            loops(x, 1, row)


def two_types(a: int) -> int:
    b = a
    b = a / 2
    return b + 1


def unknown(a: int) -> int:
    return abs(a)


def steps(a: int) -> int:
    for b in range(0, a, 2):
        a += b
    return a


def name_of(a: str) -> int:
    return 1


@pytest.mark.parametrize("function", [two_types, unknown, steps, name_of], ids=lambda one: one.__name__)
def test_what_is_not_translated_is_named(function):
    library = Library()
    compiled = library.entry(function)
    with pytest.raises(Unsupported, match=f"^test_translate.{function.__name__}"):
        compiled(1)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_random_numbers_are_numpys(seed):
    state, theirs = np.zeros(WORDS, np.int64), np.random.RandomState(seed)
    seeded(state, seed)
    for end in [1, 2, 3, 4, 100, 2**31, 7] * 60:  # the generator makes 624 numbers at once
        assert below(state, end) == theirs.randint(0, end)
        assert uniform(state) == theirs.random_sample()
        assert normal(state) == theirs.standard_normal()
