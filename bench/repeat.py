"""Profile this machine several times and compare: `python -m bench.repeat [--times N] [-o docs/REPEAT.md]`.

Two profiles of an idle machine should agree within the spread that they report (the interquartile range of the
samples). Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.report import machine, publish
from optpipe_compiler.documents.profile import Profile, Quantity
from optpipe_torch.profiler.measure import MeasureOptions, measure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OPS = ("forward", "backward_input", "backward_weight", "backward", "recompute")


def measured(profile: Profile) -> Iterator[tuple[str, Quantity]]:
    """Yield every number that comes from samples, by name."""
    for layer in profile.layers:
        for op in OPS:
            yield f"{layer.name} {op}_ns", getattr(layer, f"{op}_ns")
    machine = profile.machine
    yield "op_overhead_ns", machine.op_overhead_ns  # type: ignore[misc]
    for entry in machine.p2p:
        yield _of("message", entry.devices, "latency_ns"), entry.latency_ns  # type: ignore[misc]
        yield _of("message", entry.devices, "bytes_per_s"), entry.bytes_per_s  # type: ignore[misc]
    for link in machine.links:
        for name in ("latency_ns", *(f"{way}_bytes_per_s" for way in ("d2h", "h2d", "duplex_d2h", "duplex_h2d"))):
            yield _of("link", link.devices, name), getattr(link, name)


def _of(what: str, devices: Sequence[int] | None, name: str) -> str:
    return " ".join([what, *map(str, devices or ()), name])


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--samples", type=int, default=60, help="of every time, as the command takes them")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    wanted = MeasureOptions(samples=options.samples)
    profiles: list[dict[str, Any]] = [
        dict(measured(measure(wanted, lambda what, part: None))) for _ in range(options.times)
    ]
    rows, agreeing, pairs = [], 0, 0
    for name in profiles[0]:
        found = [profile.get(name) for profile in profiles]
        if not all(isinstance(one, Quantity) and one.samples > 1 for one in found):
            continue  # one link for all in one profile, and one for each in another; or no latency in the noise
        middle = sorted(one.value for one in found)[len(found) // 2]
        held = [abs(a.value - b.value) <= max(a.spread, b.spread) for a, b in itertools.combinations(found, 2)]
        spread = max(one.spread / max(1, one.value) for one in found)
        if spread < 1:
            agreeing, pairs = agreeing + sum(held), pairs + len(held)
        values = ", ".join(f"{one.value / middle:.2f}" for one in found)
        rows.append(f"| {name} | {middle:,} | {values} | {spread:.0%} | {sum(held)} of {len(held)} |")
    text = "\n".join(
        [
            "# Does a profile repeat?",
            "",
            f"Written by `python -m bench.repeat`; {machine()}: {options.times} profiles in a row of",
            "the default model. `of it` is each profile's number over the middle one, `spread` the largest that any of",
            "them reports, `agree` the pairs of profiles that differ by no more than the larger spread of the two:",
            f"{agreeing} of {pairs} in all, those not counted of which the spread is as large as the number itself.",
            "A shared machine may change its pace from one profile to the next, which no profile can know.",
            "",
            "| number | value | of it | spread | agree |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
    publish(text, options.output)


if __name__ == "__main__":
    main()
