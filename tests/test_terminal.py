"""What narrow windows show: whole numbers, with their units."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest
from rich.console import Group
from rich.table import Table
from rich.text import Text

from optpipe_compiler.view.terminal import Terminal

ROW = ("gis-m-offload-1, as its paper says", "301.8 ms", "20.00 GB", "7 us", "12.5%")


def shown(what, width: int) -> str:
    terminal = Terminal()
    terminal._force_terminal = True
    terminal.size = width, 25
    with terminal.capture() as captured:
        terminal.print(what)
    return captured.get()


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_table_folds_and_cuts_nothing_and_no_number(width):
    table = Table("schedule", "makespan", "peak", "a wait of a link", "idle", box=None)
    table.add_row(*ROW)
    out = shown(Group(table), width)
    assert "…" not in out
    assert all(number in out for number in ROW[1:])
    assert all(word in out for word in ("its", "paper", "says"))


@pytest.mark.parametrize("kind", [str, Text])
def test_a_number_in_a_table_stays_with_its_unit(kind):
    table = Table("schedule", "peak", "host", box=None)
    table.add_row(kind("gis-m-offload-1, as its paper says"), kind("20.00 GB"), kind("7 us"))
    for width in range(12, 30):
        assert "20.00 GB" in shown(table, width)


def test_titles_of_columns_that_do_not_wrap_are_not_cut_either():
    table = Table(box=None)
    for title in ("device", "of cap"):
        table.add_column(title, no_wrap=True)
    table.add_column("layers")
    table.add_row("0", "99%", "1-8 17-24 33-40")
    out = shown(table, 15)
    assert all(word in out for word in ("device", "of", "cap", "99%", "33-40"))


def test_a_table_that_has_room_is_as_rich_makes_it():
    table = Table("schedule", "makespan", box=None)
    table.add_row("a b c", "1 ms")
    assert shown(table, 80) == " schedule  makespan \n a b c     1 ms     \n"


@pytest.mark.parametrize("kind", [str, Text])
@pytest.mark.parametrize("unit", ["ns", "us", "ms", "s", "B", "kB", "GB", "GiB"])
def test_no_line_ends_between_a_number_and_its_unit(kind, unit):
    for width in range(12, 30):
        lines = shown(kind(f"at most as it is 20 {unit} of all"), width).splitlines()
        assert any(f"20 {unit}" in line for line in lines), lines


def test_a_dumb_terminal_has_the_columns_of_its_window(monkeypatch):
    ours, window = pty.openpty()
    fcntl.ioctl(window, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 50, 0, 0))
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("COLUMNS", raising=False)
    with os.fdopen(window, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "__stdout__", out)
        assert Terminal().width == 50
    os.close(ours)
