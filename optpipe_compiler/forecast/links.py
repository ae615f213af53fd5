"""What host links could carry: k of PipeOffload (arXiv:2503.01328), and whether offload is free, fits, pays, or not.

For a link, k is the time in which the activations of one microbatch of all devices behind it go to the host and back,
one after the other, over the time in which the busiest of these devices computes a microbatch. Both directions of a
link may be busy at once, so what decides is the load: the slower direction's share of that compute time, at the speed
that it has then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from optpipe_compiler.forecast.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents.ir import LinkCost, Schedule

NS_PER_S = 10**9
Verdict = Literal["free", "fits", "pays", "does not pay"]


@dataclass(frozen=True)
class LinkLoad:
    """One link; times in ns, of one microbatch."""

    devices: tuple[int, ...]
    round_trip_ns: int
    """Of the activations of all devices behind the link, each direction alone, one after the other."""
    compute_ns: int
    """Of the busiest device behind it."""
    k: float
    load: float
    """The busier direction's time, while both are busy, over the compute time."""
    share: float
    """Of a copy's time alone, what the device's compute loses."""
    verdict: Verdict
    """free: everything can leave and come back while the devices compute. fits: so it can, and takes its share of their
    compute. pays: a part of it can (1 / load). does not pay: one activation is longer on the way than it would stay,
    even in the deepest pipeline of these devices."""


def link_loads(schedule: Schedule) -> Iterator[LinkLoad]:
    """Yield what each host link of the schedule could carry; links that no activation needs are left out.

    A file that `verify` rejects may lack costs of a stage; then nothing is known of any link."""
    setup = schedule.setup
    classes = setup.units_by_class()
    costs, table = schedule.forecast.stages, Table(schedule)
    if len(costs) < len(schedule.stages) * setup.classes:
        return
    for link in schedule.forecast.links:
        work, away, back, alone, longest = dict.fromkeys(link.devices, 0), 0, 0, 0, 0
        for stage in (stage for stage in schedule.stages if stage.device in work):
            for number, count in classes.items():
                cost = costs[stage.stage * setup.classes + number]
                halves = cost.backward_input_ns + cost.backward_weight_ns
                work[stage.device] += count * (cost.forward_ns + min(cost.backward_ns, halves))
                if saved := table.unit(stage.stage, number).moved_before[-1]:
                    trip = _ns(saved, link.d2h_bytes_per_s, link) + _ns(saved, link.h2d_bytes_per_s, link)
                    away += count * _ns(saved, link.duplex_d2h_bytes_per_s, link)
                    back += count * _ns(saved, link.duplex_h2d_bytes_per_s, link)
                    alone, longest = alone + count * trip, max(longest, trip)
        away, back, alone = away // setup.microbatches, back // setup.microbatches, alone // setup.microbatches
        work = {device: total // setup.microbatches for device, total in work.items()}
        compute = max(work.values(), default=0)
        if alone and compute:
            load = max(away, back) / compute
            is_late = longest > schedule.setup.devices * compute
            share = link.share_permille / 1000
            verdict: Verdict = ("fits" if share else "free") if load <= 1 else "does not pay" if is_late else "pays"
            yield LinkLoad(tuple(link.devices), alone, compute, alone / compute, load, share, verdict)


def _ns(size: int, bytes_per_s: int, link: LinkCost) -> int:
    return link.latency_ns + size * NS_PER_S // max(1, bytes_per_s)
