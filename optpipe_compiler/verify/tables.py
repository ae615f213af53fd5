"""Rules on the tables of the contract: numbers, stages, devices, caps and the digest."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.units import counted
from optpipe_compiler.verify.report import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LARGEST = 2**63 - 1
"""What every reader's 64 bits hold; sums of such numbers are formed without loss all the same."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""What every larger number has in its text, if all digits are written as 0."""

PER_LAYER = (
    "saved_bytes",
    "residue_bytes",
    "captured_bytes",
    "checkpoint_bytes",
    "forward_transient_bytes",
    "backward_input_transient_bytes",
    "backward_weight_transient_bytes",
    "backward_transient_bytes",
)

FIXED = PER_LAYER[4:]
CARRY = ("bytes", "gradient_bytes", "forward_transient_bytes", "backward_transient_bytes")


def numbers(record: ir.Schedule, rule: str = "numbers") -> Iterator[Violation]:
    """Every integer of the contract and the forecast is below 2^63."""
    parts = (record.setup, record.stages, record.devices, record.forecast)
    for part, name in zip(parts, ("setup", "stages", "devices", "forecast"), strict=True):
        if _LONG in msgspec.json.encode(part).translate(_DIGITS):
            yield from too_large(msgspec.to_builtins(part), f"$.{name}", rule)


def too_large(value: Any, path: str, rule: str) -> Iterator[Violation]:
    """Yield a violation with its JSON path for every integer of 2^63 and more in `value`."""
    if isinstance(value, int):
        if value > LARGEST:
            yield Violation(rule, f"{path} is a number of {value.bit_length()} bits, expected below 2^63")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(item, str):
                yield from too_large(item, f"{path}.{key}", rule)
    elif isinstance(value, list | tuple) and not (value and isinstance(value[0], str)):
        for index, item in enumerate(value):
            yield from too_large(item, f"{path}[{index}]", rule)


def devices(schedule: ir.Schedule) -> Iterator[Violation]:
    """There are setup.devices devices, numbered from 0 in file order."""
    if len(schedule.devices) != schedule.setup.devices:
        yield Violation(
            "devices",
            f"the file lists {counted(len(schedule.devices), 'device')}, setup.devices is {schedule.setup.devices}",
        )
    for index, device in enumerate(schedule.devices):
        if device.device != index:
            yield Violation("devices", f"devices[{index}] has the number {device.device}, expected {index}")


def stages(schedule: ir.Schedule) -> Iterator[Violation]:
    """Stages are numbered from 0, sit on known devices and cut the model's layers in order and completely."""
    if not schedule.stages:
        yield Violation("stages", "the file lists no stage")
    end = 0
    for index, stage in enumerate(schedule.stages):
        if stage.stage != index:
            yield Violation("stages", f"stages[{index}] has the number {stage.stage}, expected {index}")
        if stage.device >= len(schedule.devices):
            yield Violation("stages", f"stage {index} is on device {stage.device}, which the file does not list")
        if stage.layers[0] != end or stage.layers[1] <= stage.layers[0]:
            shown = f"[{stage.layers[0]}, {stage.layers[1]})"
            yield Violation("stages", f"stage {index} has the layers {shown}, expected at least one layer from {end}")
        end = stage.layers[1]
    if end != schedule.setup.layers:
        yield Violation("stages", f"the stages end at layer {end}, setup.layers is {schedule.setup.layers}")


def layer_lists(schedule: ir.Schedule) -> Iterator[Violation]:
    """Every byte list of a stage has one entry per layer."""
    for index, stage in enumerate(schedule.stages):
        yield from _one_per_layer(index, stage, stage, PER_LAYER)


def _one_per_layer(
    index: int, stage: ir.Stage, record: ir.Stage | ir.Carry | ir.Fixed, fields: Iterable[str], part: str = ""
) -> Iterator[Violation]:
    layers = stage.layers[1] - stage.layers[0]
    for field in fields:
        found = len(getattr(record, field))
        if found != layers:
            yield Violation("stages", f"{part}{field} of stage {index} has {found} entries, expected {layers}")


def units(schedule: ir.Schedule) -> Iterator[Violation]:
    """Slices cut every microbatch in order, of one shape each; with several, each stage says what they carry."""
    setup = schedule.setup
    if isinstance(setup.units, msgspec.UnsetType):
        named = [stage.stage for stage in schedule.stages if stage.carry is not msgspec.UNSET]
        if named:
            yield Violation("units", f"stage {named[0]} has a carry, but setup.units is not there")
        named = [stage.stage for stage in schedule.stages if stage.fixed is not msgspec.UNSET]
        if named:
            yield Violation("units", f"stage {named[0]} has fixed bytes, but setup.units is not there")
        return
    cuts, shapes = setup.units.cuts, setup.units.shape_of
    if not cuts or any(len(one) != len(cuts[0]) or len(one) < 2 for one in cuts):
        yield Violation("units", "setup.units.cuts has rows of different lengths or without a slice")
        return
    for shape, row in enumerate(cuts):
        if row[0] or any(end <= begin for begin, end in pairwise(row)):
            yield Violation("units", f"setup.units.cuts[{shape}] is {row}, expected tokens that ascend from 0")
    if len(shapes) != setup.microbatches or any(shape >= len(cuts) for shape in shapes):
        message = f"setup.units.shape_of has {len(shapes)} entries up to {max(shapes, default=0)}"
        yield Violation("units", f"{message}, expected one below {len(cuts)} per microbatch ({setup.microbatches})")
    for stage in schedule.stages:
        if (stage.carry is msgspec.UNSET) != (setup.slices == 1):
            found = "no carry" if stage.carry is msgspec.UNSET else "a carry"
            yield Violation("units", f"stage {stage.stage} has {found}, but microbatches have {setup.slices} slices")


def carries(schedule: ir.Schedule) -> Iterator[Violation]:
    """Lists of a carry have one entry per layer; carry + checkpoint <= saved."""
    for index, stage in enumerate(schedule.stages):
        if isinstance(stage.carry, msgspec.UnsetType):
            continue
        yield from _one_per_layer(index, stage, stage.carry, CARRY, "carry.")
        for kept, checkpoint, saved in zip(stage.carry.bytes, stage.checkpoint_bytes, stage.saved_bytes, strict=False):
            if kept + checkpoint > saved:
                message = f"a layer of stage {index} carries {kept} bytes beside {checkpoint} checkpoint bytes"
                yield Violation("stages", f"{message} but has {saved} saved bytes")


def fixed(schedule: ir.Schedule) -> Iterator[Violation]:
    """Lists of fixed bytes have one entry per layer; fixed <= the layer's transient bytes of that op."""
    for index, stage in enumerate(schedule.stages):
        if isinstance(stage.fixed, msgspec.UnsetType):
            continue
        yield from _one_per_layer(index, stage, stage.fixed, FIXED, "fixed.")
        for field in FIXED:
            for part, whole in zip(getattr(stage.fixed, field), getattr(stage, field), strict=False):
                if part > whole:
                    message = f"a layer of stage {index} has {part} fixed bytes in {field}, which are {whole}"
                    yield Violation("stages", message)


def selective(schedule: ir.Schedule) -> Iterator[Violation]:
    """The layers of selective recompute are the stage's own, in order, none of them twice."""
    for index, stage in enumerate(schedule.stages):
        named = stage.selective_layers
        if named != sorted(set(named)) or any(not stage.layers[0] <= layer < stage.layers[1] for layer in named):
            shown = f"[{stage.layers[0]}, {stage.layers[1]})"
            yield Violation("stages", f"selective of stage {index} is {named}, expected layers of {shown} in order")


def stage_bytes(schedule: ir.Schedule) -> Iterator[Violation]:
    """Per layer: checkpoint <= saved and captured <= residue <= saved + captured."""
    for index, stage in enumerate(schedule.stages):
        columns = (stage.saved_bytes, stage.residue_bytes, stage.captured_bytes, stage.checkpoint_bytes)
        for layer, (saved, residue, captured, checkpoint) in enumerate(
            zip(*columns, strict=True), start=stage.layers[0]
        ):
            if checkpoint > saved:
                message = f"layer {layer} of stage {index} has {checkpoint} checkpoint bytes but {saved} saved bytes"
                yield Violation("stages", message)
            if not captured <= residue <= saved + captured:
                message = (
                    f"layer {layer} of stage {index} has {residue} residue bytes, "
                    f"expected {captured} (captured) to {saved + captured} (saved and captured)"
                )
                yield Violation("stages", message)


def boundaries(schedule: ir.Schedule) -> Iterator[Violation]:
    """output_bytes(s) = input_bytes(s + 1); both are 0 at the ends of the model."""
    first, last = schedule.stages[0], schedule.stages[-1]
    if first.input_bytes:
        yield Violation("stages", f"stage 0 has {first.input_bytes} input bytes, expected 0")
    if last.output_bytes:
        yield Violation("stages", f"the last stage has {last.output_bytes} output bytes, expected 0")
    for index, (stage, after) in enumerate(pairwise(schedule.stages)):
        if stage.output_bytes != after.input_bytes:
            message = f"stage {index} puts out {stage.output_bytes} bytes but stage {index + 1} takes in"
            yield Violation("stages", f"{message} {after.input_bytes}")


def caps(schedule: ir.Schedule) -> Iterator[Violation]:
    """peak_bytes <= setup.cap_bytes on every device; the sum of host_bytes is at most setup.host_cap_bytes over all
    devices, and at most a host's cap_bytes over those that stand on it."""
    setup = schedule.setup
    for index, device in enumerate(schedule.devices):
        if device.peak_bytes > setup.cap_bytes:
            message = f"device {index} promises a peak of {device.peak_bytes} bytes, over the cap of {setup.cap_bytes}"
            yield Violation("caps", message, index)
    host = sum(device.host_bytes for device in schedule.devices)
    if setup.host_cap_bytes is not None and host > setup.host_cap_bytes:
        message = f"the devices may hold {host} bytes on the host together, over its cap of {setup.host_cap_bytes}"
        yield Violation("caps", message)
    promised = {device.device: device.host_bytes for device in schedule.devices}
    for index, (members, cap) in enumerate(setup.hosts_or_none):
        held = sum(promised.get(device, 0) for device in members)
        if held > cap:
            message = f"the devices of host {index} may hold {held} bytes there together, over its cap of {cap}"
            yield Violation("caps", message)


def hosts(schedule: ir.Schedule) -> Iterator[Violation]:
    """A host is of devices that the file lists; a device stands on one host at most."""
    owner: dict[int, int] = {}
    for index, (members, _) in enumerate(schedule.setup.hosts_or_none):
        for device in members:
            if device >= len(schedule.devices):
                yield Violation("hosts", f"host {index} has device {device}, which the file does not list")
            elif device in owner:
                yield Violation("hosts", f"device {device} stands on hosts {owner[device]} and {index}")
            owner.setdefault(device, index)


def digest(schedule: ir.Schedule) -> Iterator[Violation]:
    """The digest is sha256 over the contract part."""
    expected = ir.contract_digest(schedule)
    if schedule.digest != expected:
        yield Violation("digest", f"the digest is {schedule.digest!r}, the contract part has {expected!r}")
