"""Which GPUs share their way to the host: the machine's PCI tree, as Linux shows it in sysfs."""

from __future__ import annotations

import re
from pathlib import Path

_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


def pci_address(domain: int, bus: int, device: int) -> str:
    """Return a GPU's address as sysfs writes it."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def root_port(address: str, sysfs: Path = Path("/sys")) -> str | None:
    """Return the address of the root port that the device at `address` hangs on; None where it is not known.

    A path in sysfs names the bridges from the host bridge down to the device; the first is the root port. What hangs on
    one root port, through however many switches, shares that port's link to the host; what meets only at the host
    bridge shares no link. A device right at a host bridge is a virtual machine's, which hides where it really is. An
    emulated root port looks like a real one: there only the bandwidths tell who shares.
    """
    try:
        parts = (sysfs / "bus" / "pci" / "devices" / address).resolve(strict=True).parts
    except OSError:
        return None
    bridges = [index for index, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)]
    below = parts[bridges[-1] + 1 :] if bridges else ()
    return below[0] if len(below) > 1 else None
