"""Violations as people see them: a sentence each, and the place in a small grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from small_schedules import Shape, build, changed

from optpipe_compiler.verify import Violation, verify
from optpipe_compiler.view.violations import render

if TYPE_CHECKING:
    from optpipe_compiler.documents import ir

SHAPE = Shape(microbatches=3, ranges=lambda stage, microbatch: [("offload", 2 * stage, 2 * stage + 1)])


def shown(violations: list[Violation], schedule: ir.Schedule) -> str:
    """Return what a terminal without colour shows."""
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(render(violations, schedule))
    return capture.get()


def test_no_violation_is_said_in_words() -> None:
    assert shown([], build(SHAPE)) == "no violations\n"


def test_ops_are_shown_in_the_letters_of_torch() -> None:
    shape = Shape(microbatches=1, ranges=lambda s, m: [("offload", 0, 1), ("recompute", 1, 2)] if s == 0 else [])
    schedule = build(shape)
    labels = {
        op.text for device in schedule.devices for lane in (device.compute, device.d2h, device.h2d) for op in lane
    }
    assert {"0F0", "0I0", "0W0", "0R0:1-2", "0D0:0-1", "0H0:0-1", ">0F0", "<1F0", ">1I0", "<0I0"} <= labels


def test_the_offending_op_is_marked_without_colour_next_to_its_neighbours() -> None:
    schedule = build(SHAPE)
    found = [Violation("data", "2F1 comes too early", 0, "compute", 2, (schedule.devices[0].compute[2].id,))]
    lane = [op.text for op in schedule.devices[0].compute]
    row = " ".join([*lane[:2], f"[{lane[2]}]", *lane[3:6], ".."])
    assert shown(found, schedule).splitlines() == [
        "1 violation",
        "1. data: 2F1 comes too early",
        f"   device 0 compute | {row}",
    ]


def test_every_other_lane_that_a_violation_is_about_has_its_own_row() -> None:
    def early(plain: dict[str, list[dict[str, list[dict[str, object]]]]]) -> None:
        plain["devices"][0]["h2d"][0]["after"] = []

    schedule = changed(build(SHAPE), early)
    text = shown(verify(schedule), schedule)
    assert "device 0 h2d     | [0H0:0-1] 0H1:0-1 0H2:0-1" in text
    assert "device 0 d2h     | [0D0:0-1] 0D1:0-1 0D2:0-1" in text


def test_a_violation_without_a_place_has_no_grid() -> None:
    schedule = build(SHAPE)
    wrong = msgspec.structs.replace(schedule, digest="sha256:0")
    lines = shown(verify(wrong), wrong).splitlines()
    assert lines[0] == "1 violation"
    assert lines[1].startswith("1. digest: ")
    assert not any("|" in line for line in lines)
