"""What changed between two schedules: setup, stages, order, memory ops, splits, waits, promises and forecast.

Ops have ids that do not depend on the layers of their stage, so order is compared op by op wherever both schedules put
the same number of stages on the same devices; otherwise only counts are.
"""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler.diff import ops
from optpipe_compiler.diff.records import Change, Difference
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.units import show_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from optpipe_compiler.diff.records import Value


KINDS = ("offload", "reload", "recompute", "forward", "backward_input", "backward_weight", "backward")


def compare(old: ir.Schedule, new: ir.Schedule) -> Difference:
    """Return what changed from one schedule to the other."""
    comparable = [stage.device for stage in old.stages] == [stage.device for stage in new.stages]
    return Difference(
        same_contract=ir.contract_digest(old) == ir.contract_digest(new),
        comparable=comparable,
        setup=_setup(old, new),
        stages=_stages(old, new) if comparable else _cuts(old, new),
        counts=_counts(old, new),
        moved=ops.moved(old, new) if comparable else [],
        regrouped=ops.regrouped(old, new) if comparable else [],
        waits=ops.waits(old, new) if comparable else [],
        peers=ops.peers(old, new) if comparable else [],
        promises=_promises(old, new),
        forecast=_forecast(old, new),
        deliveries=ops.deliveries(old, new) if comparable else [],
        retimed=ops.retimed(old, new) if comparable else [],
        baselines=_baselines(old, new),
        costs=_costs(old, new),
        links=_links(old, new),
        origin=_origin(old, new),
        identical=old == new,
    )


def _changes(rows: Iterable[tuple[str, Value, Value]], of: str = "") -> list[Change]:
    return [Change(name, old, new, of) for name, old, new in rows if old != new]


def _counts(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    before, after = ops.counts(old), ops.counts(new)
    return _changes((name, before[name], after[name]) for name in KINDS)


def _setup(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    names = ("devices", "microbatches", "layers", "cap_bytes", "host_cap_bytes", "reserve_bytes")
    rows = [(name, getattr(old.setup, name), getattr(new.setup, name)) for name in names]
    rows += [("slices", old.setup.slices, new.setup.slices)]
    rows += [(name, _units(old.setup, name), _units(new.setup, name)) for name in UNITS]
    rows += [("version", old.version, new.version)]
    return _changes([*rows, ("hosts", _hosts(old), _hosts(new)), ("model", _model(old), _model(new))])


UNITS = ("lengths of microbatches", "ends of slices", "tokens that sizes are for", "shapes of microbatches")


def _units(setup: ir.Setup, name: str) -> Value:
    """Return lengths, cuts or shapes of microbatches, in their order; None where they are whole and of one length."""
    units = setup.units
    if isinstance(units, msgspec.UnsetType):
        return None
    if name == "tokens that sizes are for":
        return units.tokens
    if name == "shapes of microbatches":
        return len(units.cuts)
    each = [units.cuts[shape] for shape in units.shape_of]
    if name == "lengths of microbatches":
        return _runs([str(cuts[-1]) for cuts in each])
    return _runs(["-".join(map(str, cuts)) for cuts in each]) if setup.slices > 1 else None


def _runs(words: Sequence[str]) -> str:
    """Return words with those that follow each other counted: `4 x 8, 6`."""
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    return ", ".join(f"{count} x {word}" if count > 1 else word for word, count in runs)


def _hosts(schedule: ir.Schedule) -> str | None:
    said = (f"{cap} B for devices {', '.join(map(str, devices))}" for devices, cap in schedule.setup.hosts_or_none)
    return "; ".join(said) or None


def _model(schedule: ir.Schedule) -> str | None:
    model = schedule.model
    if model is None:
        return None
    config = "".join(f" {name}={value}" for name, value in model.config.items())
    size = f"{model.microbatch_size} x {model.sequence_length} {model.dtype}, seed {model.seed}"
    return f"{model.builder}{config}, {size}"


def _cuts(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    """Say the stages as a whole, where they cannot be compared one by one."""

    def devices(schedule: ir.Schedule) -> str:
        return " ".join(str(stage.device) for stage in schedule.stages)

    def layers(schedule: ir.Schedule) -> str:
        return " ".join(_range(stage.layers) for stage in schedule.stages)

    rows: list[tuple[str, Value, Value]] = [("stages", len(old.stages), len(new.stages))]
    return _changes(
        [*rows, ("device of each", devices(old), devices(new)), ("layers of each", layers(old), layers(new))]
    )


def _stages(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    found = []
    for before, after in zip(old.stages, new.stages, strict=True):
        of = f"stage {before.stage}"
        found += _changes([("number", before.stage, after.stage)], of)
        found += _changes([("layers", _range(before.layers), _range(after.layers))], of)
        old_layers, new_layers = (show_layers(stage.selective_layers) or "none" for stage in (before, after))
        found += _changes([("selective recompute", old_layers, new_layers)], of)
        for name in before.__struct_fields__:
            if name.endswith("_bytes"):
                sizes = (_by_layer(getattr(stage, name), stage) for stage in (before, after))
                found += _summed(name, of, *sizes)
        for part, kind in (("carry", ir.Carry), ("fixed", ir.Fixed)):
            for name in kind.__struct_fields__:
                sizes = (_by_layer(_part(getattr(stage, part), name), stage) for stage in (before, after))
                found += _summed(f"{part}_{name}", of, *sizes)
    return found


def _by_layer(sizes: int | list[int], stage: ir.Stage) -> dict[str, int]:
    """Return sizes by where they are, as a change says it."""
    of = f"stage {stage.stage}"
    if isinstance(sizes, int):
        return {of: sizes}
    return {f"{of}, layer {layer}": size for layer, size in enumerate(sizes, start=stage.layers[0])}


def _summed(name: str, of: str, old: Mapping[str, int], new: Mapping[str, int]) -> list[Change]:
    """Return the change of a sum, and of its parts where some are more and others less: the sum does not tell."""
    return _changes([(name, sum(old.values()), sum(new.values()))], of) + _parted(name, old, new)


def _parted(name: str, old: Mapping[str, int], new: Mapping[str, int]) -> list[Change]:
    """Return the changes of parts, if some are more and others less."""
    if old.keys() != new.keys():
        return []
    grown = {new[part] > had for part, had in old.items() if new[part] != had}
    return [change for part in old if len(grown) > 1 for change in _changes([(name, old[part], new[part])], part)]


def _range(layers: ir.Range) -> str:
    return f"{layers[0]}-{layers[1] - 1}" if layers[1] > layers[0] + 1 else str(layers[0])


def _part(record: ir.Carry | ir.Fixed | msgspec.UnsetType, name: str) -> list[int]:
    return [] if isinstance(record, msgspec.UnsetType) else getattr(record, name)


def _promises(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    found = []
    for index in range(max(len(old.devices), len(new.devices))):
        for name in ("device", "peak_bytes", "host_bytes"):
            values = [getattr(s.devices[index], name) if index < len(s.devices) else None for s in (old, new)]
            found += _changes([(name, values[0], values[1])], f"device {index}")
    return found


_FORECAST: dict[str, Callable[[ir.Schedule], Value]] = {
    "objective": lambda schedule: schedule.forecast.objective,
    "op_overhead_ns": lambda schedule: schedule.forecast.op_overhead_ns,
    "makespan_ns": lambda schedule: schedule.forecast.makespan_ns,
    "span_ns": lambda schedule: schedule.forecast.span_ns,
    "bubble_fraction": lambda schedule: schedule.forecast.bubble_fraction,
    "lower_bound_ns": lambda schedule: schedule.forecast.lower_bound_ns,
    "bound": lambda schedule: schedule.forecast.bound,
    "outcome": lambda schedule: schedule.forecast.outcome,
    "method": lambda schedule: schedule.forecast.method,
    "largest_peak_bytes": lambda schedule: max((device.peak_bytes for device in schedule.devices), default=0),
}


def _forecast(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    return _changes((name, read(old), read(new)) for name, read in _FORECAST.items())


def _baselines(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    """Return what is said differently of the schedules that both are compared with, and which one of them lacks."""
    before, after = old.forecast.baselines, new.forecast.baselines
    names = [*before, *(name for name in after if name not in before)]
    found = []
    for name in names:
        had, has = before.get(name), after.get(name)
        if had is None or has is None or (had.makespan_ns is None) != (has.makespan_ns is None):
            found += _changes([("is compared with", _compared(had), _compared(has))], name)
            continue
        rows: list[tuple[str, Value, Value]] = []
        for field in ir.Baseline.__struct_fields__:
            rows.append((field, _plain(getattr(had, field)), _plain(getattr(has, field))))
        found += _changes(rows, name)
    return found


def _compared(baseline: ir.Baseline | None) -> str:
    """Say whether there is something to compare with, or why not."""
    if baseline is None or baseline.makespan_ns is not None:
        return _there(baseline)
    return f"no: {baseline.reason}" if baseline.reason else "no"


def _costs(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    """Return the costs that differ of a microbatch, in the mean over those of a step: other lengths, other costs.

    Where some parts cost more and others less, or the mean is rounded away, these follow by stage.
    """
    found = []
    for name in (name for name in ir.StageCost.__struct_fields__ if name.endswith("_ns")):
        before, after = _mean(old, name), _mean(new, name)
        total = _changes([(name, before, after)])
        by_part = [_cost_parts(schedule, name) for schedule in (old, new)]
        found += total + _parted(name, *by_part)
        if not total and not _parted(name, *by_part) and by_part[0].keys() == by_part[1].keys():
            found += [
                row for part, had in by_part[0].items() for row in _changes([(name, had, by_part[1][part])], part)
            ]
    return found


def _mean(schedule: ir.Schedule, name: str) -> int:
    """Return a cost of all stages together, in the mean over the microbatches of a step."""
    setup = schedule.setup
    units = setup.units
    count = Counter({0: setup.microbatches} if isinstance(units, msgspec.UnsetType) else units.shape_of)
    costs = [(cost.shape, sum(_listed(getattr(cost, name)))) for cost in schedule.forecast.stages]
    total = sum(count[0 if isinstance(shape, msgspec.UnsetType) else shape] * ns for shape, ns in costs)
    return round(total / count.total())


def _cost_parts(schedule: ir.Schedule, name: str) -> dict[str, int]:
    """Return a cost by stage, shape and slice, and by layer where it is."""
    found = {}
    for cost in schedule.forecast.stages:
        of = f"stage {cost.stage}"
        if not isinstance(cost.shape, msgspec.UnsetType) and len(set(_shapes(schedule))) > 1:
            of += f", shape {cost.shape}"
        if not isinstance(cost.slice, msgspec.UnsetType) and schedule.setup.slices > 1:
            of += f", slice {cost.slice}"
        value = getattr(cost, name)
        first = schedule.stages[cost.stage].layers[0] if cost.stage < len(schedule.stages) else 0
        for layer, ns in enumerate(_listed(value), start=first):
            found[f"{of}, layer {layer}" if isinstance(value, list) else of] = ns
    return found


def _shapes(schedule: ir.Schedule) -> list[int]:
    units = schedule.setup.units
    return [0] if isinstance(units, msgspec.UnsetType) else list(range(len(units.cuts)))


def _listed(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def _links(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    """Return what differs of host links, and which one of the schedules lacks."""
    before, after = ({tuple(link.devices): link for link in one.forecast.links} for one in (old, new))
    names = [name for name in ir.LinkCost.__struct_fields__ if name not in ("devices", "compute_permille")]
    found = []
    for devices in [*before, *(devices for devices in after if devices not in before)]:
        of = f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
        had, has = before.get(devices), after.get(devices)
        if had is None or has is None:
            found += _changes([("host link", _there(had), _there(has))], of)
            continue
        rows = [(name, getattr(had, name), getattr(has, name)) for name in names]
        found += _changes([*rows, ("compute_permille", had.share_permille, has.share_permille)], of)
    return found


def _origin(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    before, after = old.provenance, new.provenance
    names = ("compiler", "profile", "profile_digest")
    found = _changes([("revision", old.revision, new.revision)])
    found += _changes((name, getattr(before, name), getattr(after, name)) for name in names)
    for name in sorted(before.options.keys() | after.options.keys()):
        found += _changes([(name, _plain(before.options.get(name)), _plain(after.options.get(name)))], "option")
    return found


def _plain(value: Value | msgspec.UnsetType) -> Value:
    return None if isinstance(value, msgspec.UnsetType) else str(value) if isinstance(value, bool) else value


def _there(record: object) -> str:
    return "no" if record is None else "yes"
