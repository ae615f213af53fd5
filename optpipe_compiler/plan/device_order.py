"""In which order the pipeline passes the devices: those that share a host link far from each other.

Until its first gradient comes back a device computes forwards, and what memory does not hold of them its link must have
taken. Neighbours in the pipeline wait for their first gradients nearly equally long, so that two behind one link are
short of it together, where the first device waits longest, and spare it together, where the last begins latest. Devices
of one link that are far from each other even that out; `fill_and_drain` of model/bounds.py says by how much. A plan
says which device has which stage, so the order is free, but for hosts: messages between these may take longer than a
profile knows, and the pipeline stays as long on each as it would by the devices' numbers.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from optpipe_compiler.documents.profile import Machine, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.model.placement import Layout

    Order = tuple[int, ...]


def other_order(machine: Machine, one: Layout) -> Order | None:
    """Return the order of a placement's devices that goes round the links, one device of each at a time.

    None where that is the order of their numbers, and where devices or links differ.
    """
    devices = one.devices
    links = [members for members, _ in machine.host_links(devices)]
    alike = {
        (link.alone, link.duplex, value_of(link.latency_ns), value_of(link.compute_permille))
        for _, link in machine.host_links(devices)
    }
    speeds = set((machine.time_permille or [])[:devices])
    if sum(map(len, links)) < devices or len(alike) > 1 or len(speeds) > 1:
        return None
    order = tuple(device for host in _hosts(machine, devices) for device in _round(host, links))
    return None if order == tuple(range(devices)) else order


def _hosts(machine: Machine, devices: int) -> list[list[int]]:
    """Return the devices of each host, in the order of their numbers; those that no host names stand on one."""
    host_of = {device: number for number, host in enumerate(machine.hosts) for device in host.devices}
    found: dict[int | None, list[int]] = {}
    for device in range(devices):
        found.setdefault(host_of.get(device), []).append(device)
    return list(found.values())


def _round(host: list[int], links: list[list[int]]) -> Iterator[int]:
    """Yield the devices of a host, one of each link in turn."""
    behind = [[device for device in members if device in host] for members in links]
    for turn in zip_longest(*behind):
        yield from (device for device in turn if device is not None)
