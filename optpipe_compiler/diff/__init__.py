"""What changed between two schedules: setup, stages, order, memory ops, splits, waits, promises and forecast.

Ops have ids that do not depend on the layers of their stage, so order is compared op by op wherever both schedules put
the same number of stages on the same devices; otherwise only counts are.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from optpipe_compiler.diff import ops
from optpipe_compiler.diff.records import Change, Difference
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.units import show_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optpipe_compiler.diff.records import Value


KINDS = ("offload", "reload", "recompute", "backward_input", "backward_weight", "backward")
"""Ops whose number may change while setup and stages stay."""


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
        promises=_promises(old, new),
        forecast=_forecast(old, new),
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
    rows += [("slices", old.setup.slices, new.setup.slices), ("tokens of slices", _tokens(old), _tokens(new))]
    return _changes([*rows, ("hosts", _hosts(old), _hosts(new)), ("model", _model(old), _model(new))])


def _tokens(schedule: ir.Schedule) -> str | None:
    """Say where the slices of each shape of microbatches begin and end, and how many microbatches have it."""
    units = schedule.setup.units
    if isinstance(units, msgspec.UnsetType):
        return None
    count = Counter(units.shape_of)
    said = (f"{count[shape]} of {'-'.join(map(str, cuts))}" for shape, cuts in enumerate(units.cuts))
    return f"{', '.join(said)}, costs for {units.tokens}"


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
        found += _changes([("layers", _range(before.layers), _range(after.layers))], of)
        old_layers, new_layers = (show_layers(stage.selective_layers) or "none" for stage in (before, after))
        found += _changes([("selective recompute", old_layers, new_layers)], of)
        for name in before.__struct_fields__:
            if name.endswith("_bytes"):
                found += _changes([(name, _total(getattr(before, name)), _total(getattr(after, name)))], of)
        for part, kind in (("carry", ir.Carry), ("fixed", ir.Fixed)):
            for name in kind.__struct_fields__:
                old_size, new_size = (_part(getattr(stage, part), name) for stage in (before, after))
                found += _changes([(f"{part}_{name}", old_size, new_size)], of)
    return found


def _range(layers: ir.Range) -> str:
    return f"{layers[0]}-{layers[1] - 1}" if layers[1] > layers[0] + 1 else str(layers[0])


def _part(record: ir.Carry | ir.Fixed | msgspec.UnsetType, name: str) -> int:
    return 0 if isinstance(record, msgspec.UnsetType) else sum(getattr(record, name))


def _total(size: int | list[int]) -> int:
    return size if isinstance(size, int) else sum(size)


def _promises(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    found = []
    for index in range(max(len(old.devices), len(new.devices))):
        for name in ("peak_bytes", "host_bytes"):
            values = [getattr(s.devices[index], name) if index < len(s.devices) else None for s in (old, new)]
            found += _changes([(name, values[0], values[1])], f"device {index}")
    return found


_FORECAST: dict[str, Callable[[ir.Schedule], Value]] = {
    "objective": lambda schedule: schedule.forecast.objective,
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


def _costs(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    """Return the costs that differ of a microbatch, in the mean over those of a step: other lengths, other costs."""
    names = [name for name in ir.StageCost.__struct_fields__ if name.endswith("_ns")]

    def means(schedule: ir.Schedule) -> dict[str, int]:
        setup, costs = schedule.setup, schedule.forecast.stages
        units = setup.units
        shapes = [0] * setup.microbatches if isinstance(units, msgspec.UnsetType) else units.shape_of
        count = Counter(shapes)
        of = [count[0 if isinstance(cost.shape, msgspec.UnsetType) else cost.shape] for cost in costs]
        sums = {name: sum(n * _total(getattr(cost, name)) for n, cost in zip(of, costs, strict=True)) for name in names}
        return {name: round(total / len(shapes)) for name, total in sums.items()}

    before, after = means(old), means(new)
    return _changes((name, before[name], after[name]) for name in names)


def _links(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    before = {tuple(link.devices): link for link in old.forecast.links}
    names = [name for name in ir.LinkCost.__struct_fields__ if name not in ("devices", "compute_permille")]
    found = []
    for link in new.forecast.links:
        if (had := before.get(tuple(link.devices))) is not None:
            of = f"device{'s' if len(link.devices) > 1 else ''} {', '.join(map(str, link.devices))}"
            rows = [(name, getattr(had, name), getattr(link, name)) for name in names]
            found += _changes([*rows, ("compute_permille", had.share_permille, link.share_permille)], of)
    return found


def _origin(old: ir.Schedule, new: ir.Schedule) -> list[Change]:
    before, after = old.provenance, new.provenance
    names = ("compiler", "profile", "profile_digest")
    found = _changes((name, getattr(before, name), getattr(after, name)) for name in names)
    for name in sorted(before.options.keys() | after.options.keys()):
        found += _changes([(name, _option(before.options, name), _option(after.options, name))], "option")
    return found


def _option(options: dict[str, Any], name: str) -> Value:
    value = options.get(name)
    return str(value) if isinstance(value, bool) else value
