"""Files of every version load for ever; and what the compiler writes changes only on purpose.

`*-v1.json` are never rewritten, not by `make golden` either. They were made by

    optpipe profile uniform --devices 2 --layers-per-device 2 --recompute-ms 0.8 --d2h-ms 1.6 --h2d-ms 1.6
        --shared-links pairs --duplex-slowdown 1.25 --boundary-fraction 0.1 --static-gb 0.5 --head-ms 0.1,0.1,0.05
        -o profile-v1.json
    optpipe compile profile-v1.json --mem 1.75GB --host-mem 3GB --microbatches 3 --reproducible --time-limit 3
        -o schedule-v1.json

and `*-v2.json`, whose layers know selective recompute, by tests/test_selective.py's `costs()` and

    optpipe compile profile-v2.json --mem 2GB --microbatches 4 --no-offload --reproducible --time-limit 3
        -o schedule-v2.json

and `*-v3.json`, whose layers can run slice by slice, by

    optpipe profile uniform --devices 2 --layers-per-device 2 --recompute-ms 0.8 --d2h-ms 1.6 --h2d-ms 1.6
        --boundary-fraction 0.1 --static-gb 0.5 --head-ms 0.1,0.1,0.05 --sliceable --sequence-length 4096
        --attention-share 0.3 --kv-fraction 0.2 --slice-overhead-ms 0.01 -o profile-v3.json
    echo 4096 4096 3000 > lengths
    optpipe compile profile-v3.json --mem 1.6GB --host-mem 3GB --lengths lengths --slices 3 --reproducible
        --time-limit 1 -o schedule-v3.json

and `*-v4.json`, whose devices stand on a host of 1 GB and one of 0.5 GB (`machine.hosts`, put in by hand), by

    optpipe profile uniform --devices 2 --layers-per-device 2 --recompute-ms 0.8 --d2h-ms 1.6 --h2d-ms 1.6
        --boundary-fraction 0.1 --static-gb 0.5 --head-ms 0.1,0.1,0.05 -o profile-v4.json
    optpipe compile profile-v4.json --mem 1.75GB --microbatches 4 --no-recompute --reproducible --time-limit 1
        -o schedule-v4.json

and `*-v5.json`, whose weight gradients do not shrink with the tokens of a slice, from profile-v3.json with transient
bytes of W and B (100 MB, of which 80 MB fixed; put in by hand), by

    optpipe compile profile-v5.json --mem 1.7GB --host-mem 3GB --lengths lengths --slices 3 --reproducible
        --time-limit 1 -o schedule-v5.json
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.documents import ir, profile
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.verify import verify
from tests.instances import uniform

GOLDEN = Path(__file__).parent / "golden"
GB = 10**9


PROFILES = {1: "profile-v1.json", 2: "profile-v5.json"}
"""By version; the numbers of the files are the schedules'."""


@pytest.mark.parametrize("version", range(1, profile.VERSION + 1))
def test_a_profile_of_every_version_loads_and_is_written_back_to_the_same_bytes(version):
    path = GOLDEN / PROFILES[version]
    costs = profile.load(path)
    assert costs.version == version
    assert canonical(costs).encode() == path.read_bytes()
    assert len(costs.expanded_layers()) == 5


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_a_profile_with_selective_recompute_slices_hosts_or_fixed_bytes_is_written_back_to_the_same_bytes(version):
    path = GOLDEN / f"profile-v{version}.json"
    assert canonical(profile.load(path)).encode() == path.read_bytes()


@pytest.mark.parametrize("version", range(1, ir.VERSION + 1))
def test_a_schedule_of_every_version_loads_verifies_and_is_the_same_when_it_is_written_back(version):
    path = GOLDEN / f"schedule-v{version}.json"
    schedule = ir.load(path)
    assert verify(schedule, profile.load(GOLDEN / f"profile-v{version}.json")) == []
    assert ir.parse(ir.to_text(schedule), "again") == schedule
    assert json.loads(ir.to_text(schedule)) == json.loads(path.read_text())


def test_the_golden_schedule_has_every_kind_of_op():
    devices = ir.load(GOLDEN / "schedule-v1.json").devices
    ops = Counter(op.name for device in devices for op in (*device.compute, *device.d2h, *device.h2d))
    assert set(ops) == {kind.name for kind in ir.OPS}
    assert any(op.after for device in devices for op in (*device.compute, *device.h2d))


def test_a_published_schedule_is_written_as_before(golden):
    """From the plan to the file: order, messages, waits, promises, forecast, and the published makespans beside it."""
    costs = uniform(2, 2, shared_links="pairs", duplex_slowdown=1.25, boundary_fraction=0.1, static_gb=0.5)
    options = Options(mem_bytes=3 * GB, microbatches=3, method="gis-h-offload", time_limit_s=1.0, reproducible=True)
    golden("gis-h-offload.json", ir.to_text(compile_schedule(costs, options).schedule))


def test_a_proven_optimum_is_as_before(golden):
    """Only what is unique: among equally good schedules another version of OR-Tools may find another one."""
    costs = uniform(2, 1, recompute_ms=0.6, d2h_ms=0.5, h2d_ms=0.5, shared_links="pairs")
    options = Options(mem_bytes=GB * 3 // 2, microbatches=3, time_limit_s=20.0, reproducible=True)
    forecast = compile_schedule(costs, options).schedule.forecast
    proved = {
        "outcome": forecast.outcome,
        "makespan_ns": forecast.makespan_ns,
        "lower_bound_ns": forecast.lower_bound_ns,
        "baselines": {name: [one.makespan_ns, one.peak_bytes, one.fits] for name, one in forecast.baselines.items()},
    }
    golden("optimum.json", json.dumps(proved, indent=1) + "\n")
