"""The schedule file: its records, version, digest and text form. docs/IR.md states what they mean."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, get_args

import msgspec

from optpipe_compiler.documents.files import Record, canonical, decode, read_text
from optpipe_compiler.documents.ops import OpName, op_id
from optpipe_compiler.documents.profile import MOST_LAYERS, Count, Model, Positive
from optpipe_compiler.errors import BadInput, of_kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FORMAT = "optpipe-schedule"
VERSION = 5
"""2: stages may name layers with selective recompute. 3: microbatches may be cut into slices, and differ in length.
4: hosts with a cap each. 5: transient bytes that do not shrink with a unit's tokens.
A file has the lowest version that says all of it, so that older tools read what they understand."""
REVISION = 3
"""1: the kind of a baseline. 2: what each device knows of its deliveries. 3: what copies take from compute, in files
where they do; others have revision 2."""

MOST_DEVICES = 1024
"""In a schedule; docs/IR.md states the limits."""

Range = tuple[Count, Count]
"""Layers `[first, end)` in model order."""

READ = {"forward": "recv_activation", "backward": "recv_gradient", "backward_input": "recv_gradient"}
"""By kind of op: the kind of message that it reads, where its neighbour is on another device."""

Outcome = Literal["optimal", "feasible"]
Objective = Literal["makespan", "span"]
Lane = Literal["compute", "d2h", "h2d"]
LANES: tuple[Lane, ...] = ("compute", "d2h", "h2d")
BaselineKind = Literal["paper", "stock", "composition"]


class Op(Record, frozen=True, kw_only=True):
    """What every op has. `after`: ids of ops of the same device that complete before this one starts."""

    name: ClassVar[str]
    """The op's kind, spelled out."""
    stage: Count
    microbatch: Count
    slice: Count | msgspec.UnsetType = msgspec.UNSET
    """Of the microbatch; absent where microbatches are not cut into slices."""
    after: list[str] = msgspec.field(default_factory=list)

    @property
    def slice_or_none(self) -> int | None:
        """The slice, None where microbatches are not cut: what names of ops take."""
        return None if self.slice is msgspec.UNSET else self.slice

    @property
    def unit(self) -> tuple[int, int | None]:
        """The microbatch and the slice."""
        return self.microbatch, self.slice_or_none

    @property
    def id(self) -> str:
        """The op's name in waits: `kind:stage:microbatch` or `kind:stage:microbatch.slice`, unique in a schedule."""
        return op_id(self.name, self.stage, self.microbatch, None, self.slice_or_none)

    @property
    def text(self) -> str:
        """The op's name for people: stage, letter, microbatch and slice, as in `2F0` or `2F0.1`."""
        layers = self.layers if isinstance(self, SavedOp) else None
        return OpName(self.name, self.stage, self.microbatch, layers, self.slice_or_none).text

    @property
    def received_id(self) -> str | None:
        """The id of the receive that the op reads if its neighbour is on another device; None: it never reads any."""
        return self._named(READ[self.name], self.stage) if self.name in READ else None

    def _named(self, kind: str, stage: int) -> str:
        """Return the id of an op of the same unit."""
        return op_id(kind, stage, self.microbatch, None, self.slice_or_none)


class Forward(Op, frozen=True, kw_only=True, tag_field="op", tag="forward"):
    """F."""


class BackwardInput(Op, frozen=True, kw_only=True, tag_field="op", tag="backward_input"):
    """I: gradient of the stage's input."""


class BackwardWeight(Op, frozen=True, kw_only=True, tag_field="op", tag="backward_weight"):
    """W: gradients of the stage's weights."""


class Backward(Op, frozen=True, kw_only=True, tag_field="op", tag="backward"):
    """B: both gradients, fused."""


class MessageOp(Op, frozen=True, kw_only=True):
    """The issue of one half of a message; `stage` is the op's own stage, `peer` the other device."""

    peer: Count

    @property
    def send_id(self) -> str:
        """The id of the message's send, whichever half this is."""
        if self.name == "recv_activation":
            return self._named("send_activation", self.stage - 1)
        return self._named("send_gradient", self.stage + 1) if self.name == "recv_gradient" else self.id


class SendActivation(MessageOp, frozen=True, kw_only=True, tag_field="op", tag="send_activation"):
    """Output of `stage` to the device of `stage + 1`."""


class RecvActivation(MessageOp, frozen=True, kw_only=True, tag_field="op", tag="recv_activation"):
    """Input of `stage` from the device of `stage - 1`; its buffer is allocated here."""


class SendGradient(MessageOp, frozen=True, kw_only=True, tag_field="op", tag="send_gradient"):
    """Gradient of the input of `stage` to the device of `stage - 1`."""


class RecvGradient(MessageOp, frozen=True, kw_only=True, tag_field="op", tag="recv_gradient"):
    """Gradient of the output of `stage` from the device of `stage + 1`; its buffer is allocated here."""


class SavedOp(Op, frozen=True, kw_only=True):
    """An op on what the forward saved for `layers` of the stage."""

    layers: Range

    @property
    def id(self) -> str:
        """`kind:stage:microbatch:first-end`, with a slice `kind:stage:microbatch.slice:first-end`."""
        return op_id(self.name, self.stage, self.microbatch, self.layers, self.slice_or_none)


class Recompute(SavedOp, frozen=True, kw_only=True, tag_field="op", tag="recompute"):
    """R: runs the forward of `layers` again; its forward kept only their checkpoint."""


class Offload(SavedOp, frozen=True, kw_only=True, tag_field="op", tag="offload"):
    """Copies to the host, then frees on the device."""


class Reload(SavedOp, frozen=True, kw_only=True, tag_field="op", tag="reload"):
    """Allocates on the device, copies back, then frees on the host."""


ComputeOp = (
    Forward
    | BackwardInput
    | BackwardWeight
    | Backward
    | Recompute
    | SendActivation
    | RecvActivation
    | SendGradient
    | RecvGradient
)


OPS: tuple[type[ComputeOp | Offload | Reload], ...] = (*get_args(ComputeOp), Offload, Reload)
"""All kinds of ops."""
for _kind in OPS:
    _kind.name = str(_kind.__struct_config__.tag)


class Units(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What flows through the stages, where that is not whole microbatches of one length: a unit is a slice of one.

    Microbatches of one shape have one length and are cut alike; all shapes have the same number of slices.
    """

    tokens: Positive
    """Length of the microbatch that the byte figures of the stages are for."""
    cuts: list[list[Count]]
    """By shape, the token at which each slice begins, from 0 on, and last the length of the microbatch."""
    shape_of: list[Count]
    """By microbatch, its shape."""

    @property
    def slices(self) -> int:
        """Slices of every microbatch; 1 where they are not cut."""
        return len(self.cuts[0]) - 1

    def tokens_of(self, microbatch: int, slice: int | None) -> tuple[int, int]:
        """Return the tokens [begin, end) of a unit within its microbatch."""
        cuts = self.cuts[self.shape_of[microbatch]]
        return cuts[slice or 0], cuts[(slice or 0) + 1]


class Host(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The memory of one host for the offloads of its devices."""

    devices: list[Count]
    cap_bytes: Count


class Setup(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The sizes and caps that the schedule is for."""

    devices: Positive
    microbatches: Positive
    layers: Positive
    cap_bytes: Count
    """Per device; covers static, reserve, activations, messages and transient bytes."""
    host_cap_bytes: Count | None
    """For all devices together."""
    reserve_bytes: Count
    units: Units | msgspec.UnsetType = msgspec.UNSET
    """Absent: every microbatch is one unit, and all are of the length that the byte figures are for."""
    hosts: list[Host] | msgspec.UnsetType = msgspec.UNSET
    """There where devices stand on several hosts, each with a cap of its own."""

    @property
    def hosts_or_none(self) -> list[tuple[list[int], int]]:
        """Of each host its devices and its cap; empty where there are none."""
        hosts = [] if isinstance(self.hosts, msgspec.UnsetType) else self.hosts
        return [(host.devices, host.cap_bytes) for host in hosts]

    @property
    def host_caps(self) -> list[tuple[list[int], int]]:
        """Which devices together have which cap on the host: each host's, then that of all devices."""
        every = [] if self.host_cap_bytes is None else [(list(range(self.devices)), self.host_cap_bytes)]
        return [*self.hosts_or_none, *every]

    @property
    def slices(self) -> int:
        """Slices of every microbatch; 1 where they are not cut."""
        return 1 if isinstance(self.units, msgspec.UnsetType) else self.units.slices

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Tokens of each microbatch; None where all are as long as the byte figures are for."""
        units = self.units
        if isinstance(units, msgspec.UnsetType) or {cuts[-1] for cuts in units.cuts} == {units.tokens}:
            return None
        return tuple(units.cuts[shape][-1] for shape in units.shape_of)

    @property
    def classes(self) -> int:
        """Kinds of units with costs of their own: shapes times slices."""
        return 1 if isinstance(self.units, msgspec.UnsetType) else len(self.units.cuts) * self.slices

    def has_unit(self, microbatch: int, slice: int | None) -> bool:
        """Whether it is known of which kind a unit is: always where all are alike."""
        if isinstance(self.units, msgspec.UnsetType) or self.classes == 1:
            return True
        return microbatch < len(self.units.shape_of) and (slice or 0) < self.slices

    def class_of(self, microbatch: int, slice: int | None) -> int:
        """Return the kind of a unit: (shape of its microbatch) x slices + slice."""
        if isinstance(self.units, msgspec.UnsetType):
            return 0
        return self.units.shape_of[microbatch] * self.slices + (slice or 0)

    def units_by_class(self) -> dict[int, int]:
        """Return how many units each kind has; in no time that grows with numbers the file merely names."""
        if isinstance(self.units, msgspec.UnsetType):
            return {0: self.microbatches}
        shapes = Counter(self.units.shape_of)
        return {shape * self.slices + k: count for shape, count in shapes.items() for k in range(self.slices)}

    def tokens_of(self, microbatch: int, slice: int | None) -> tuple[int, int] | None:
        """Return the tokens [begin, end) of a unit within its microbatch; None: all, however many there are."""
        return None if isinstance(self.units, msgspec.UnsetType) else self.units.tokens_of(microbatch, slice)


class Carry(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What slices of a microbatch pass on within a stage; one entry per layer, for a whole microbatch.

    `bytes` are a part of `saved_bytes`: keys and values, which later slices read. `gradient_bytes` is what their
    gradients take until the slice's own backward. The other two are transient: what an op needs for the tokens before
    its slice, in a forward or recompute, and in a backward_input or backward.
    """

    bytes: list[Count]
    gradient_bytes: list[Count]
    forward_transient_bytes: list[Count]
    backward_transient_bytes: list[Count]


class Fixed(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The parts of a stage's transient bytes that do not shrink with a unit's tokens; one entry per layer."""

    forward_transient_bytes: list[Count]
    backward_input_transient_bytes: list[Count]
    backward_weight_transient_bytes: list[Count]
    backward_transient_bytes: list[Count]


class Stage(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Some layers in a row with their bytes per microbatch; lists have one entry per layer.

    Where `Setup.units` is there the bytes are those of a microbatch of `Units.tokens`, and scale with tokens.
    """

    stage: Count
    device: Count
    layers: Range
    static_bytes: Count
    input_bytes: Count
    output_bytes: Count
    saved_bytes: list[Count]
    residue_bytes: list[Count]
    captured_bytes: list[Count]
    checkpoint_bytes: list[Count]
    forward_transient_bytes: list[Count]
    backward_input_transient_bytes: list[Count]
    backward_weight_transient_bytes: list[Count]
    backward_transient_bytes: list[Count]
    selective: list[Count] | msgspec.UnsetType = msgspec.UNSET
    """The layers whose cheap tensors are recomputed within their backward, by number; absent: none."""
    carry: Carry | msgspec.UnsetType = msgspec.UNSET
    """There where, and only where, microbatches are cut into several slices."""
    fixed: Fixed | msgspec.UnsetType = msgspec.UNSET
    """Only where `Setup.units` is there; absent: all scales with tokens."""

    @property
    def selective_layers(self) -> list[int]:
        """The same, empty where there are none."""
        return [] if isinstance(self.selective, msgspec.UnsetType) else self.selective


class Delivered(Record, frozen=True, kw_only=True, omit_defaults=False):
    """`before` an op of the device starts these `sends` of it are delivered, said of no earlier op of the lane."""

    before: str
    sends: list[str]


class Device(Record, frozen=True, kw_only=True, omit_defaults=False):
    """One device's promise and its lanes, in the order in which they run."""

    device: Count
    peak_bytes: Count
    """Never exceeded, in any execution that order and waits allow."""
    host_bytes: Count
    """Host memory of this device's offloads, never exceeded either."""
    compute: list[ComputeOp]
    d2h: list[Offload]
    h2d: list[Reload]
    deliveries: list[Delivered] | msgspec.UnsetType = msgspec.UNSET
    """What follows from order and waits of all devices, by lane; files before revision 2 leave it to the reader."""

    @property
    def lanes(self) -> dict[Lane, Sequence[Op]]:
        """The ops of each lane, in order."""
        return {"compute": self.compute, "d2h": self.d2h, "h2d": self.h2d}

    @property
    def ops(self) -> Iterator[Op]:
        """All ops, lane by lane."""
        return chain(self.compute, self.d2h, self.h2d)


class StageCost(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Durations of one stage's ops as forecast; `recompute_ns` per layer, without the overhead of an op.

    Where `Setup.units` is there, each stage has such a record for each shape and slice, in this order.
    """

    stage: Count
    shape: Count | msgspec.UnsetType = msgspec.UNSET
    slice: Count | msgspec.UnsetType = msgspec.UNSET
    forward_ns: Count
    backward_input_ns: Count
    backward_weight_ns: Count
    backward_ns: Count
    recompute_ns: list[Count]
    send_activation_ns: Count
    """From the end of the forward to the arrival at the next stage; 0 on the same device and for the last stage."""
    send_gradient_ns: Count
    """From the end of the (input) gradient to the arrival at the previous stage."""


class LinkCost(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A host link as forecast: a transfer of n bytes takes latency_ns + round(n * 10^9 / bandwidth).

    The bandwidth is `duplex_*` if a transfer of the other direction runs at some time of it.
    """

    devices: list[Count]
    d2h_bytes_per_s: Positive
    h2d_bytes_per_s: Positive
    duplex_d2h_bytes_per_s: Positive
    duplex_h2d_bytes_per_s: Positive
    latency_ns: Count
    compute_permille: Annotated[int, msgspec.Meta(ge=1, le=1000)] | msgspec.UnsetType = msgspec.UNSET
    """What a transfer takes from its device's compute lane, in thousandths of its time alone; absent: nothing. Behind a
    forward the lane runs nothing for what its offloads take, before a backward for what its reloads take."""

    @property
    def share_permille(self) -> int:
        """The same, 0 where it is absent."""
        return 0 if isinstance(self.compute_permille, msgspec.UnsetType) else self.compute_permille


class Times(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Forecast start and end of every op of one lane, in the lane's order."""

    device: Count
    lane: Lane
    start_ns: list[Count]
    end_ns: list[Count]


class OpForecast(NamedTuple):
    """An op with its forecast times in ns: of a message its issue and its arrival."""

    device: int
    lane: Lane
    op: Op
    start_ns: int
    end_ns: int


NOT_TRIED = "not tried"
NOT_IN_FULL = "not run in full"
"""In the `reason` of a baseline without a makespan; where neither stands there it is not defined for the instance."""


class Baseline(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A schedule to compare with on the same costs; null where it is not defined for this instance, with the reason.

    `kind` says whose it is: a paper's, what frameworks run (stock), or a paper's order with offloads or recomputations
    that neither combines with it (composition). Files of revision 0 do not say it.
    """

    makespan_ns: Count | None
    peak_bytes: Count | None
    fits: bool
    reason: str = ""
    kind: BaselineKind | msgspec.UnsetType = msgspec.UNSET


class Forecast(Record, frozen=True, kw_only=True, omit_defaults=False):
    """What the compiler expects and proved; no runtime depends on it, though the times may tell one when to issue."""

    objective: Objective
    makespan_ns: Count
    span_ns: Count
    """The longest time from first start to last end on one device's compute lane."""
    bubble_fraction: float
    """Compute-idle time / (devices x makespan)."""
    outcome: Outcome
    method: str
    lower_bound_ns: Count
    bound: str
    baselines: dict[str, Baseline]
    op_overhead_ns: Count
    stages: list[StageCost]
    links: list[LinkCost]
    times: list[Times]

    @property
    def value_ns(self) -> int:
        """What was minimised: the makespan, or the span."""
        return self.makespan_ns if self.objective == "makespan" else self.span_ns

    @property
    def gap(self) -> float:
        """(value - bound) / value: how much shorter another schedule could be, as a share of the value."""
        return 1 - self.lower_bound_ns / self.value_ns if self.value_ns else 0.0


class Provenance(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Where the file comes from; no dates, no hosts."""

    compiler: str
    profile: str
    profile_digest: str
    options: dict[str, str | int | float | bool | None]


class Schedule(Record, frozen=True, kw_only=True, omit_defaults=False):
    """A whole schedule.json. Contract: everything up to `devices`. Forecast: the rest."""

    format: Literal["optpipe-schedule"] = "optpipe-schedule"
    version: int = 1
    revision: int = 2
    digest: str
    setup: Setup
    model: Model | None
    stages: list[Stage]
    devices: list[Device]
    forecast: Forecast
    provenance: Provenance

    @property
    def pipeline(self) -> list[int]:
        """The devices in the order in which the pipeline first gets to them; those without a stage last.

        Files that `verify` rejects may have stages on others, too.
        """
        owners = [stage.device for stage in self.stages if stage.device < len(self.devices)]
        return list(dict.fromkeys([*owners, *range(len(self.devices))]))

    def stages_of(self, device: int) -> list[Stage]:
        """Return the stages that a device owns, in model order."""
        return [stage for stage in self.stages if stage.device == device]

    def static_bytes(self, device: int) -> int:
        """Return what the stages of a device hold all the time."""
        return sum(stage.static_bytes for stage in self.stages_of(device))

    def activation_bytes(self, device: int) -> int:
        """Return a device's promised peak without static and reserve bytes."""
        return self.devices[device].peak_bytes - self.static_bytes(device) - self.setup.reserve_bytes

    def timed(self, device: int | None = None, *, messages: bool = False) -> Iterator[OpForecast]:
        """Yield the ops of a device (absent: of all), lane by lane, with their forecast times; with `messages` sends
        and receives, too, which take no lane."""
        for times in self.forecast.times:
            if device in (None, times.device):
                ops = self.devices[times.device].lanes[times.lane]
                for op, start, end in zip(ops, times.start_ns, times.end_ns, strict=True):
                    if messages or not isinstance(op, MessageOp):
                        yield OpForecast(times.device, times.lane, op, start, end)


@dataclass(frozen=True)
class Checked:
    """A schedule in which the judge found no violation; only `verify.check` makes one."""

    schedule: Schedule
    known_text: str | None = field(default=None, compare=False, repr=False)
    """Its canonical text, of a file that is as it was written; None: not known."""

    @cached_property
    def text(self) -> str:
        """Its canonical text, made once: the file of a large schedule takes seconds."""
        return to_text(self.schedule) if self.known_text is None else self.known_text


def contract_digest(schedule: Schedule) -> str:
    """Return sha256 over the contract part: what all ranks must agree on before they start."""
    devices = [msgspec.structs.replace(device, deliveries=msgspec.UNSET) for device in schedule.devices]
    parts = (schedule.version, schedule.setup, schedule.model, schedule.stages, devices)
    return "sha256:" + hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def seal(schedule: Schedule) -> Schedule:
    """Return the schedule with its version, revision and digest filled in."""
    is_selective = any(stage.selective_layers for stage in schedule.stages)
    version = 3 if schedule.setup.units is not msgspec.UNSET else 2 if is_selective else 1
    version = 4 if schedule.setup.hosts is not msgspec.UNSET else version
    version = 5 if any(stage.fixed is not msgspec.UNSET for stage in schedule.stages) else version
    revision = REVISION if any(link.share_permille for link in schedule.forecast.links) else 2
    schedule = msgspec.structs.replace(schedule, version=version, revision=revision)
    return msgspec.structs.replace(schedule, digest=contract_digest(schedule))


def to_text(schedule: Schedule) -> str:
    """Return the canonical text: one op per line, fixed key order, LF."""
    return canonical(schedule)


def load(path: Path | str) -> Schedule:
    """Read a schedule file; raise BadInput when its form is wrong. Whether it is safe is `verify`'s question."""
    return parse(read_text(Path(of_kind("path", path, (str, Path), "a path"))), str(path))


def parse(text: str, name: str) -> Schedule:
    """Decode the text of a schedule; `name` stands for the file in messages."""
    schedule = decode(text, Schedule, name, format=FORMAT, version=VERSION, revision=REVISION)
    _check_version(schedule, name)
    _check_sizes(schedule, name)
    _check_units(schedule, name)
    expected = contract_digest(schedule)
    if schedule.digest != expected:
        raise BadInput(
            f"{name}: $.digest is {schedule.digest!r}, expected {expected!r}: the contract part was edited or cut; "
            "compile it again"
        )
    return schedule


def _check_version(schedule: Schedule, name: str) -> None:
    """Refuse what a file's version does not have: older tools would misread it."""
    if schedule.version < 3 and schedule.setup.units is not msgspec.UNSET:
        raise BadInput(f"{name}: $.setup.units: is not a field of version {schedule.version}, expected $.version 3")
    if schedule.version < 4 and schedule.setup.hosts is not msgspec.UNSET:
        raise BadInput(f"{name}: $.setup.hosts: is not a field of version {schedule.version}, expected $.version 4")
    for index, stage in enumerate(schedule.stages):
        if schedule.version == 1 and stage.selective is not msgspec.UNSET:
            raise BadInput(f"{name}: $.stages[{index}].selective: is not a field of version 1, expected $.version 2")
        if schedule.version < 5 and stage.fixed is not msgspec.UNSET:
            path = f"{name}: $.stages[{index}].fixed"
            raise BadInput(f"{path}: is not a field of version {schedule.version}, expected $.version 5")


def _check_units(schedule: Schedule, name: str) -> None:
    """Refuse units that name no tokens: all who read the file count by them."""
    units, setup = schedule.setup.units, schedule.setup
    if isinstance(units, msgspec.UnsetType):
        return
    path = f"{name}: $.setup.units"
    if not units.cuts or len(units.cuts[0]) < 2:
        raise BadInput(f"{path}.cuts has no slice, expected at least one shape of at least one slice")
    for shape, cuts in enumerate(units.cuts):
        if len(cuts) != len(units.cuts[0]) or cuts[0] or any(end <= begin for begin, end in pairwise(cuts)):
            raise BadInput(f"{path}.cuts[{shape}] is {cuts}, expected {len(units.cuts[0])} tokens that ascend from 0")
    if len(units.shape_of) != setup.microbatches or any(shape >= len(units.cuts) for shape in units.shape_of):
        raise BadInput(
            f"{path}.shape_of has {len(units.shape_of)} entries up to {max(units.shape_of, default=0)}, expected a "
            f"shape below {len(units.cuts)} for each of {setup.microbatches} microbatches"
        )


def _check_sizes(schedule: Schedule, name: str) -> None:
    """Refuse what is beyond the limits of docs/IR.md, before time is spent on it."""
    for found, most, what in (
        (max(schedule.setup.devices, len(schedule.devices)), MOST_DEVICES, "devices"),
        (sum(len(stage.saved_bytes) for stage in schedule.stages), MOST_LAYERS, "layers in $.stages"),
        (len(schedule.stages), MOST_LAYERS, "stages"),
        (sum(max(1, len(devices)) for devices, _ in schedule.setup.hosts_or_none), MOST_DEVICES, "devices on hosts"),
    ):
        if found > most:
            raise BadInput(f"{name}: has {found} {what}, expected at most {most}")
