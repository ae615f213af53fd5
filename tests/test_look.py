"""Words and colours of ops: one table for the terminal, the SVG and the page."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
from small_schedules import Shape, build

from optpipe_compiler.documents.ops import LETTERS
from optpipe_compiler.forecast import HOLDERS, Cause
from optpipe_compiler.view import report
from optpipe_compiler.view.look import HELD, IDLE, LOOKS, for_page, ink

SCRIPTS = Path(report.__file__).parent


def test_every_op_that_takes_time_has_a_look():
    assert set(LOOKS) == set(LETTERS)
    assert len({look.words for look in LOOKS.values()}) == len({look.colour for look in LOOKS.values()}) == len(LOOKS)


def test_the_page_reads_the_table_and_has_no_other():
    page = report.render(build(Shape((0, 1))))
    assert '"kinds":{"F":{"name":"forward","does":"forward","colour":"#0072b2","hatch":false}' in page
    assert for_page().keys() == set(LETTERS.values())
    texts = "".join(path.read_text() for path in SCRIPTS.glob("*.js"))
    assert not any(look.colour in texts for look in LOOKS.values())


def luminance(colour):
    """As WCAG 2 defines it, from 0 to 1."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("kind", LOOKS)
def test_letters_can_be_read_on_their_colour(kind):
    hexadecimal = {"black": "#000000", "white": "#ffffff"}[ink(LOOKS[kind].colour)]
    assert contrast(LOOKS[kind].colour, hexadecimal) >= 4.5


def test_neighbours_differ_in_lightness_or_hatch():
    lightness = {kind: luminance(look.colour) for kind, look in LOOKS.items()}
    alike = [
        (one, other)
        for one, other in combinations(LOOKS, 2)
        if abs(lightness[one] - lightness[other]) < 0.02 and LOOKS[one].hatch == LOOKS[other].hatch
    ]
    assert [pair for pair in alike if not {"offload", "reload"} & set(pair)] == []
    assert all(re.fullmatch("#[0-9a-f]{6}", look.colour) for look in LOOKS.values())


def test_there_are_words_for_every_cause_and_holder_and_colours_that_show_on_light_and_dark_paper():
    assert set(IDLE) == set(Cause)
    assert tuple(HELD) == HOLDERS
    lanes = re.findall(r"--lane: (#\w{6})", (SCRIPTS / "page.css").read_text())
    assert len(lanes) == 2
    assert all(contrast(look.colour, lane) >= 3 for look in IDLE.values() for lane in lanes)
    every = [look.colour for table in (LOOKS, IDLE, HELD) for look in table.values()]
    assert len(set(every)) == len(every)
