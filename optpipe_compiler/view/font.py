"""A bitmap font for pictures: 5 x 9 dots per glyph, seven rows above the line and two below it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 5, 9
ADVANCE = WIDTH + 1

_ROWS = """
0 0e 11 13 15 19 11 0e 00 00   1 04 0c 04 04 04 04 0e 00 00   2 0e 11 01 02 04 08 1f 00 00
3 0e 11 01 06 01 11 0e 00 00   4 02 06 0a 12 1f 02 02 00 00   5 1f 10 1e 01 01 11 0e 00 00
6 06 08 10 1e 11 11 0e 00 00   7 1f 01 02 04 08 08 08 00 00   8 0e 11 11 0e 11 11 0e 00 00
9 0e 11 11 0f 01 02 0c 00 00   B 1e 11 11 1e 11 11 1e 00 00   F 1f 10 10 1e 10 10 10 00 00
G 0e 11 10 17 11 11 0f 00 00   I 0e 04 04 04 04 04 0e 00 00   M 11 1b 15 15 11 11 11 00 00
R 1e 11 11 1e 14 12 11 00 00   W 11 11 11 15 15 1b 11 00 00   a 00 00 0e 01 0f 11 0f 00 00
b 10 10 1e 11 11 11 1e 00 00   c 00 00 0e 11 10 11 0e 00 00   d 01 01 0f 11 11 11 0f 00 00
e 00 00 0e 11 1f 10 0e 00 00   f 06 09 08 1e 08 08 08 00 00   g 00 00 0f 11 11 11 0f 01 0e
h 10 10 1e 11 11 11 11 00 00   i 04 00 0c 04 04 04 0e 00 00   j 02 00 06 02 02 02 02 12 0c
k 10 10 12 14 18 14 12 00 00   l 0c 04 04 04 04 04 0e 00 00   m 00 00 1a 15 15 15 15 00 00
n 00 00 1e 11 11 11 11 00 00   o 00 00 0e 11 11 11 0e 00 00   p 00 00 1e 11 11 11 1e 10 10
q 00 00 0f 11 11 11 0f 01 01   r 00 00 16 19 10 10 10 00 00   s 00 00 0f 10 0e 01 1e 00 00
t 08 08 1e 08 08 09 06 00 00   u 00 00 11 11 11 13 0d 00 00   v 00 00 11 11 11 0a 04 00 00
w 00 00 11 11 15 15 0a 00 00   x 00 00 11 0a 04 0a 11 00 00   y 00 00 11 11 11 11 0f 01 0e
z 00 00 1f 02 04 08 1f 00 00   . 00 00 00 00 00 0c 0c 00 00   , 00 00 00 00 00 0c 04 08 00
% 19 19 02 04 08 13 13 00 00   ; 00 0c 0c 00 00 0c 04 08 00   - 00 00 00 0e 00 00 00 00 00
"""
"""A glyph and its rows from the top, in hexadecimal; the leftmost dot is the highest bit."""


def _read(rows: str) -> dict[str, npt.NDArray[np.bool_]]:
    words = rows.split()
    return {
        words[at]: np.array(
            [[int(row, 16) >> bit & 1 for bit in (4, 3, 2, 1, 0)] for row in words[at + 1 : at + 10]], bool
        )
        for at in range(0, len(words), HEIGHT + 1)
    }


GLYPHS = _read(_ROWS)
BLANK = np.zeros((HEIGHT, WIDTH), bool)


def dots(text: str) -> npt.NDArray[np.bool_]:
    """Return the dots of a line of text; characters that the font does not have stay blank."""
    gap = np.zeros((HEIGHT, 1), bool)
    columns = [column for character in text for column in (GLYPHS.get(character, BLANK), gap)]
    return np.concatenate(columns[:-1] or [np.zeros((HEIGHT, 0), bool)], axis=1)
