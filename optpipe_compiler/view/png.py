"""The schedule as a PNG picture: the chart of `svg` as pixels, without a library for images."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

import numpy as np

from optpipe_compiler.errors import BadInput
from optpipe_compiler.view.font import ADVANCE, HEIGHT, dots
from optpipe_compiler.view.svg import COLOURS, NAMES, caption

if TYPE_CHECKING:
    import numpy.typing as npt

    from optpipe_compiler.documents.ir import Device, Schedule

    Pixels = npt.NDArray[np.uint8]

WIDTH, LEFT, RIGHT, LANE, THIN, GAP, TOP = 2400, 160, 24, 56, 14, 24, 72
MOST_DEVICES = 256
DOT = 2
"""Pixels per dot of the font."""
EMPTY, INK, WHITE = (243, 243, 243), (34, 34, 34), (255, 255, 255)
DARK_ON = ("backward_weight", "backward")
"""Ops whose colour is too light for a white label."""


def render(schedule: Schedule) -> bytes:
    """Return the file."""
    return encode(draw(schedule))


def draw(schedule: Schedule) -> Pixels:
    """Return the picture, height x width x RGB."""
    if len(schedule.devices) > MOST_DEVICES:
        raise BadInput(f"a png has room for {MOST_DEVICES} devices, not for {len(schedule.devices)}; expected --to svg")
    heights = [LANE + (2 * THIN + 8 if device.d2h else 0) + GAP for device in schedule.devices]
    picture = np.full((TOP + sum(heights) + 60, WIDTH, 3), 255, np.uint8)
    _legend(picture, schedule)
    top = TOP
    for device, height in zip(schedule.devices, heights, strict=True):
        _text(picture, 8, top + (LANE - HEIGHT * DOT) // 2 + DOT, f"device {device.device}")
        picture[top : top + LANE, LEFT : WIDTH - RIGHT] = EMPTY
        _bars(picture, schedule, device, top)
        top += height
    _text(picture, LEFT, top + 6, caption(schedule))
    return picture


def encode(picture: Pixels) -> bytes:
    """Return an 8-bit RGB PNG (ISO/IEC 15948): signature, header, one compressed block of unfiltered rows, end."""
    height, width, _ = picture.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, width * 3)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _bars(picture: Pixels, schedule: Schedule, device: Device, top: int) -> None:
    begin = min((min(times.start_ns) for times in schedule.forecast.times if times.start_ns), default=0)
    scale = (WIDTH - LEFT - RIGHT) / max(1, schedule.forecast.makespan_ns)
    places = {"compute": (top, LANE), "d2h": (top + LANE + 4, THIN), "h2d": (top + LANE + THIN + 6, THIN)}
    for times in schedule.forecast.times:
        if times.device != device.device:
            continue
        y, height = places[times.lane]
        for op, start, end in zip(getattr(device, times.lane), times.start_ns, times.end_ns, strict=True):
            if op.name in COLOURS and end > start:
                x = LEFT + round((start - begin) * scale)
                width = max(1, round((end - begin) * scale) - (x - LEFT) - 1)
                letter, colour = COLOURS[op.name]
                picture[y : y + height, x : x + width] = _rgb(colour)
                label = f"{letter}{op.microbatch}"
                if letter and width > _width(label) + 4:
                    middle = (x + (width - _width(label)) // 2, y + (height - 7 * DOT) // 2)
                    _text(picture, *middle, label, INK if op.name in DARK_ON else WHITE)


def _legend(picture: Pixels, schedule: Schedule) -> None:
    present = {op.name for device in schedule.devices for op in (*device.compute, *device.d2h, *device.h2d)}
    x, y = LEFT, 24
    for name, (letter, colour) in COLOURS.items():
        if name in present:
            text = f"{letter} {NAMES[letter]}" if letter else name
            picture[y - 5 : y + 19, x : x + 24] = _rgb(colour)
            _text(picture, x + 34, y, text)
            x += 74 + _width(text)


def _width(text: str) -> int:
    return (len(text) * ADVANCE - 1) * DOT


def _text(picture: Pixels, x: int, y: int, text: str, colour: tuple[int, int, int] = INK) -> None:
    """Draw a line of text with its top left corner at (x, y), cut off at the picture's edge."""
    mask = np.kron(dots(text), np.ones((DOT, DOT), bool))
    part = picture[y : y + mask.shape[0], x : x + mask.shape[1]]
    part[mask[: part.shape[0], : part.shape[1]]] = colour


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
