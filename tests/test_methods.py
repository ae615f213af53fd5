"""The page of methods: every method is described, formulas are what the machine finds, text and page are in step."""

from __future__ import annotations

from math import ceil, gcd, lcm
from pathlib import Path

import pytest
from test_published import bubble, cut, on

from optpipe_compiler.machine.orders import peaks
from optpipe_compiler.model.schedule import Kind
from optpipe_compiler.published import METHODS
from optpipe_compiler.published.descriptions import CITATIONS, SYMBOLS, describe
from optpipe_compiler.published.listing import as_markdown, as_text, is_formula

PAGE = Path(__file__).parent.parent / "docs" / "METHODS.md"


def value(formula: str, devices: int, microbatches: int, stages: int, slices: int) -> float:
    """A formula in slots of one stage's F of one slice, where F = I = W."""
    slots = stages * slices
    names = {"P": devices, "M": microbatches, "v": stages, "F": slots, "I": slots, "W": slots, "B": 2 * slots}
    names["n"] = slices
    return eval(formula, {"ceil": ceil, "gcd": gcd, "min": min, **names})


def formulas(part: str) -> list[tuple[str, str]]:
    """Each method whose bubble or memory is a formula, with it."""
    found = [(name, getattr(describe(name), part).split(" where ")[0]) for name in METHODS]
    return [(name, text) for name, text in found if is_formula(text)]


def whole_groups(devices: int) -> int:
    """How many microbatches are whole groups of GIS, GIS-M and GIS-H."""
    return lcm(6 * devices, ceil(3 * devices / 4))


def sizes(name: str):
    return [(devices, stages) for devices in (2, 3, 5, 8) for _, stages in METHODS[name].placements]


@pytest.mark.parametrize(("name", "formula"), formulas("bubble"))
def test_the_bubble_is_what_the_formula_says(name, formula):
    for devices, stages in sizes(name):
        microbatches = whole_groups(devices)
        schedule = on(name, devices, microbatches, stages)
        again = schedule.count(Kind.R) // devices
        assert bubble(schedule) - again == value(formula, devices, microbatches, stages, cut(name, devices))


@pytest.mark.parametrize(("name", "formula"), formulas("memory"))
def test_the_memory_of_the_fullest_device_is_what_the_formula_says(name, formula):
    for devices, stages in sizes(name):
        slices = cut(name, devices)
        found = max(peaks(on(name, devices, 6 * devices, stages))) / stages / slices
        assert found == pytest.approx(value(formula, devices, 6 * devices, stages, slices))


def test_most_orders_have_formulas_and_every_method_is_described():
    assert len(formulas("bubble")) >= 12
    assert len(formulas("memory")) >= 20
    for name, method in METHODS.items():
        assert all(describe(name)), name
        assert set(method.source.split(", ")) <= set(CITATIONS)
    assert describe("own-order") is describe("own-order-recompute") is None


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_list_has_every_method_with_all_that_the_page_says_and_fits_the_window(width):
    text, page = as_text(width), as_markdown()
    words = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= width
    for name, method in METHODS.items():
        for part in (name, method.source, *describe(name)):
            assert part in words
            assert part.split(" where ")[0] in page
    assert all(f"{symbol}: {says}" in words for symbol, says in SYMBOLS.items())


def test_the_page_in_the_docs_is_the_one_that_is_made():
    assert PAGE.read_text() == as_markdown(), "run make methods"
