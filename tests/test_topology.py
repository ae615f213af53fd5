"""Who shares a host link, on PCI trees made of directories and links as sysfs has them."""

from __future__ import annotations

import pytest

from optpipe_torch.profiler.topology import pci_address, root_port

SWITCH = "pci0000:16/0000:16:02.0/0000:17:00.0"
TREES = {
    "root ports of their own": (
        ["pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:00/0000:00:03.0/0000:02:00.0"],
        ["0000:00:01.0", "0000:00:03.0"],
    ),
    "host bridges of their own": (
        ["pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:80/0000:80:01.0/0000:81:00.0"],
        ["0000:00:01.0", "0000:80:01.0"],
    ),
    "two behind one switch, one beside it": (
        [
            f"{SWITCH}/0000:18:00.0/0000:19:00.0",
            f"{SWITCH}/0000:18:04.0/0000:1a:00.0",
            "pci0000:16/0000:16:03.0/0000:1b:00.0",
        ],
        ["0000:16:02.0", "0000:16:02.0", "0000:16:03.0"],
    ),
    "four behind a switch of switches": (
        [
            f"{SWITCH}/0000:18:0{port}.0/0000:{bus}:00.0/0000:{bus}:01.0/0000:{bus}:0{last}.0"
            for port, bus in ((0, 20), (4, 30))
            for last in (2, 3)
        ],
        ["0000:16:02.0"] * 4,
    ),
    "a virtual machine's": (["pci0000:00/0000:00:04.0", "pci0000:00/0000:00:05.0"], [None, None]),
    "a virtual machine's, with a domain for each": (
        ["LNXSYSTM:00/VMBUS:00/47505500-0001/pci10001:00/10001:00:00.0"],
        [None],
    ),
    "behind a bridge that is itself a PCI device": (
        ["pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0/10000:e1:00.0"],
        ["10000:e0:06.0"],
    ),
    "no PCI device at all": (["virtual/misc/0000:00:00.0"], [None]),
}


@pytest.mark.parametrize("name", TREES)
def test_what_hangs_on_one_root_port_shares_its_link(tmp_path, name):
    paths, expected = TREES[name]
    by_address = tmp_path / "bus" / "pci" / "devices"
    by_address.mkdir(parents=True)
    addresses = []
    for path in paths:
        (tmp_path / "devices" / path).mkdir(parents=True)
        addresses.append(path.rsplit("/", 1)[1])
        (by_address / addresses[-1]).symlink_to(f"../../../devices/{path}")
    assert [root_port(address, tmp_path) for address in addresses] == expected


def test_a_device_that_sysfs_does_not_show_is_not_known(tmp_path):
    assert root_port("0000:01:00.0", tmp_path) is None
    (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True)
    (tmp_path / "bus" / "pci" / "devices" / "0000:01:00.0").symlink_to("../../../devices/gone")
    assert root_port("0000:01:00.0", tmp_path) is None


def test_addresses_are_spelled_as_sysfs_does():
    assert pci_address(0, 0x3B, 0) == "0000:3b:00.0"
    assert pci_address(0x10001, 0, 0x1F) == "10001:00:1f.0"
