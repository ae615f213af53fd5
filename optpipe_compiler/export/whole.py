"""What formats of compute ops alone can carry: whole microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optpipe_compiler.errors import BadInput

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import Schedule


def refuse_units(schedule: Schedule, name: str, what: str) -> None:
    """Raise BadInput for slices, which `what` cannot name; `name` stands for the schedule's file."""
    setup = schedule.setup
    if setup.slices > 1:
        raise BadInput(
            f"{name}: $.setup.units has {setup.slices} slices per microbatch, which {what} cannot carry; expected a "
            "schedule of whole microbatches (optpipe compile --slices 1)"
        )
