"""Sizes and times as people write and read them."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optpipe_compiler.documents.units import (
    FACTORS,
    enumerated,
    exact_cap,
    parse_bytes,
    parse_cap,
    parse_ns,
    short_bytes,
    show_bytes,
    show_hosts,
    show_ns,
    show_slicing,
)
from optpipe_compiler.errors import BadInput


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("12B", 12),
        ("40GB", 40 * 10**9),
        ("40gb", 40 * 10**9),
        (" 40 GB ", 40 * 10**9),
        ("512MB", 512 * 10**6),
        ("3KB", 3000),
        ("2TB", 2 * 10**12),
        ("1GiB", 2**30),
        ("37.25GiB", 37 * 2**30 + 2**28),
        ("1.5KiB", 1536),
    ],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert parse_bytes(text, "--mem") == size


@given(
    whole=st.integers(0, 4000), digits=st.text("0123456789", min_size=1, max_size=6), unit=st.sampled_from([*FACTORS])
)
def test_a_decimal_size_is_exact_and_rounded_down(whole, digits, unit):
    text = f"{whole}.{digits}"
    assert parse_bytes(text + unit, "--mem") == int(Fraction(text) * FACTORS[unit])


@given(st.integers(0, 2 * 10**6))
def test_a_cap_that_a_refusal_names_can_be_pasted(size):
    assert parse_cap(exact_cap(size), "--mem") == size


@pytest.mark.parametrize(
    "text", ["", "GB", "40XB", "40G", "-1GB", "1e9", "1.5.2GB", ".5GB", "1_000", "inf", "nan", "4 0GB", "9" * 5000]
)
def test_a_wrong_size_is_refused_with_option_value_and_expectation(text):
    with pytest.raises(BadInput, match=f"^--mem is {re.escape(repr(text))}, expected a size such as 40GB, "):
        parse_bytes(text, "--mem")


def test_a_size_that_the_files_cannot_hold_is_refused():
    assert parse_bytes(str(2**62 - 1), "--mem") == 2**62 - 1
    with pytest.raises(BadInput, match=r"^--host-mem is '9999999TB', expected less than 2\^62 bytes$"):
        parse_bytes("9999999TB", "--host-mem")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB (0.98 KiB)"),
        (5_000_000, "5.00 MB (4.77 MiB)"),
        (40 * 10**9, "40.00 GB (37.25 GiB)"),
        (-2 * 10**9, "-2.00 GB (-1.86 GiB)"),
    ],
)
def test_a_size_is_shown_in_decimal_and_binary_units(size, text):
    assert show_bytes(size) == text
    assert short_bytes(size) == text.split(" (")[0]


@given(size=st.integers(10**9, 10**14))
def test_a_size_that_is_shown_reads_back_to_half_of_its_last_digit_in_either_unit(size):
    for shown in re.fullmatch(r"(.*) \((.*)\)", show_bytes(size)).groups():
        unit = parse_bytes(f"1 {shown.split()[1]}", "--mem")
        assert abs(parse_bytes(shown, "--mem") - size) <= unit / 200 + 1  # and a byte, as bytes are whole


@pytest.mark.parametrize(
    ("time", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1500, "1.5 us"),
        (12_550_000, "12.55 ms"),
        (3_000_000_000, "3 s"),
        (1_234_567 * 10**9, "1,234,567 s"),
    ],
)
def test_a_time_is_shown_in_the_largest_unit_that_it_reaches(time, text):
    assert show_ns(time) == text


@pytest.mark.parametrize(
    ("text", "ns"),
    [("12.5ms", 12_500_000), ("2s", 2 * 10**9), (" 300 us ", 300_000), ("7ns", 7), ("0", 0), ("0.1MS", 10**5)],
)
def test_times_are_read_in_the_units_that_they_are_shown_in(text, ns):
    assert parse_ns(text, "--from") == ns


@pytest.mark.parametrize("text", ["", "ms", "5", "-1ms", "1h", "1e3ms", "nan"])
def test_a_time_without_a_unit_or_below_zero_is_refused(text):
    with pytest.raises(BadInput, match=r"--to is .* expected a time such as"):
        parse_ns(text, "--to")


@pytest.mark.parametrize(
    ("total", "hosts", "text"),
    [
        (None, [], "taken as unlimited"),
        (5, [], "5 B"),
        (None, [5], "5 B on 1 host"),
        (9, [5, 5], "5 B on each of 2 hosts, 9 B on all together"),
        (None, [5, 6], "5 B, 6 B on 2 hosts"),
    ],
)
def test_what_hosts_hold_is_said_for_one_and_for_several(total, hosts, text):
    assert show_hosts(total, hosts) == text


def test_lengths_are_a_range_only_where_they_differ():
    assert show_slicing(1, (4, 4)) == "for microbatches of 4 tokens, 8 in all"
    assert show_slicing(1, (4, 8)) == "for microbatches of 4 to 8 tokens, 12 in all"


def test_a_part_that_has_a_comma_ends_with_one():
    busy = "0.7% waiting for device 1, which is busy with other work"
    assert enumerated([busy, "0.4% while it drains"]) == f"{busy}, and 0.4% while it drains"
    assert enumerated(["a", "b", busy]) == f"a, b, and {busy}"
    assert enumerated(["a", "b"]) == "a and b"
    assert enumerated([]) == ""
