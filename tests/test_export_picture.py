"""The PNG: what a decoder finds in it, and that the chart is where it belongs."""

from __future__ import annotations

import re
import struct
import zlib

import numpy as np
import pytest
from small_schedules import Shape, build

from optpipe_compiler.view import png, svg
from optpipe_compiler.view.font import GLYPHS, HEIGHT, WIDTH, dots


def offload(stage, microbatch):
    return [("offload", 2 * stage, 2 * stage + 2)]


def decoded(data: bytes) -> np.ndarray:
    """Read back an 8-bit RGB PNG with unfiltered rows; every checksum is checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack(">I", data[at + 8 + length : at + 12 + length]) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        at += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_a_picture_is_read_back_as_it_was_drawn():
    schedule = build(Shape((0, 1), microbatches=3, ranges=offload))
    assert np.array_equal(decoded(png.render(schedule)), png.draw(schedule))


def test_equal_schedules_give_equal_bytes():
    assert png.render(build(Shape((0, 1)))) == png.render(build(Shape((0, 1))))


@pytest.mark.parametrize("ranges", [lambda stage, microbatch: [], offload])
def test_every_op_is_drawn_in_its_lane_at_its_time_in_its_colour(ranges):
    schedule = build(Shape((0, 1, 1, 0), microbatches=3, ranges=ranges))
    picture = png.draw(schedule)
    scale = (png.WIDTH - png.LEFT - png.RIGHT) / schedule.forecast.makespan_ns
    begin = min(min(times.start_ns) for times in schedule.forecast.times if times.start_ns)
    top, seen = png.TOP, 0
    for device in schedule.devices:
        rows = {"compute": top + 2, "d2h": top + png.LANE + 4, "h2d": top + png.LANE + png.THIN + 6}
        for times in (times for times in schedule.forecast.times if times.device == device.device):
            for op, start, end in zip(getattr(device, times.lane), times.start_ns, times.end_ns, strict=True):
                if op.name in svg.COLOURS and end > start:
                    x = png.LEFT + round(((start + end) / 2 - begin) * scale)
                    hexadecimal = "".join(f"{value:02x}" for value in picture[rows[times.lane], x])
                    assert f"#{hexadecimal}" == svg.COLOURS[op.name][1], op.id
                    seen += 1
        top += png.LANE + (2 * png.THIN + 8 if device.d2h else 0) + png.GAP
    expected = [op for device in schedule.devices for op in (*device.compute, *device.d2h, *device.h2d)]
    assert seen == sum(op.name in svg.COLOURS for op in expected)


def test_a_lane_without_ops_is_no_obstacle_to_either_picture():
    schedule = build(Shape((0, 1)))
    assert [] in [times.start_ns for times in schedule.forecast.times]
    assert png.render(schedule)
    assert svg.render(schedule).count("<title>") == 12


def test_a_schedule_too_long_for_its_width_is_still_drawn():
    schedule = build(Shape((0,), microbatches=700))
    picture = decoded(png.render(schedule))
    assert picture.shape[1] == png.WIDTH


def test_the_font_has_every_character_that_pictures_use():
    texts = ["device 0123456789", " ".join(svg.NAMES.values()), "offload reload", "FIWBR", "kMG", "ns us ms s"]
    texts.append(re.sub(r"\d", "0", svg.caption(build(Shape((0, 1))))))
    assert set("".join(texts)) - {" "} <= set(GLYPHS)


def test_every_glyph_has_its_own_shape_and_fits():
    assert all(glyph.shape == (HEIGHT, WIDTH) and glyph.any() for glyph in GLYPHS.values())
    assert len({glyph.tobytes() for glyph in GLYPHS.values()}) == len(GLYPHS)


def test_text_is_as_wide_as_its_characters():
    assert dots("F0").shape == (HEIGHT, 2 * WIDTH + 1)
    assert dots("").shape == (HEIGHT, 0)
    assert not dots("\N{SNOWMAN}").any()
