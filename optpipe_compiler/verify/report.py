"""What the judge says: one violation of one rule, with the place in the schedule where it shows."""

from __future__ import annotations

from dataclasses import dataclass

from optpipe_compiler.errors import Rejected


@dataclass(frozen=True)
class Violation:
    """One broken rule; `device`, `lane` and `index` give the place of the offending op where there is one."""

    rule: str
    """Short name of the rule, such as `device-memory`."""
    message: str
    """One sentence that names ops, devices and numbers."""
    device: int | None = None
    lane: str | None = None
    index: int | None = None
    ops: tuple[str, ...] = ()
    """Ids of the ops that the violation is about, the offending one first."""


class Violated(Rejected):
    """A schedule that had to be sound is not; the text is that of its first violation."""

    def __init__(self, violations: list[Violation]) -> None:
        super().__init__(violations[0].message)
        self.violations = violations
