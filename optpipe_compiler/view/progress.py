"""Progress on stderr: one line that is rewritten on a terminal, a line per change elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.text import Text

from optpipe_compiler.documents.units import show_ns

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.console import Console, RenderableType

    from optpipe_compiler.compiler import Progress


class _Status:
    """A context that shows a line with a spinner on a terminal, and nothing elsewhere."""

    def __init__(self, console: Console, line: RenderableType) -> None:
        self.console = console
        self.status = console.status(line, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.status.stop()


class ProgressLine(_Status):
    """A context in which `update` shows where the search stands: incumbent, bound, gap, and time of the limit.

    On a terminal the time goes on by itself; with `every_plan` each better plan leaves a line there, too.
    """

    def __init__(self, console: Console, limit_s: float | None = None, *, every_plan: bool = False) -> None:
        super().__init__(console, _Clock(self))
        self.limit = "" if limit_s is None else f" of {limit_s:g} s"
        self.every_plan = every_plan
        self.begin = time.monotonic()
        self.state = "planning"
        self.last = ""
        self.phases: set[str] = set()

    def update(self, progress: Progress) -> None:
        """Show `progress`; away from a terminal only in a new phase, or when the incumbent or the bound has changed."""
        best = "-" if progress.incumbent_ns is None else show_ns(progress.incumbent_ns)
        bound = "-" if progress.bound_ns is None else show_ns(progress.bound_ns)
        gap = "-" if progress.gap is None else f"{progress.gap:.1%}"
        state = f"incumbent {best} ({progress.method or 'none'})  bound {bound}  gap {gap}"
        phase = progress.phase.split()[0]
        self.state = f"{progress.phase}: {state}"
        text = f"{self.state}  {progress.elapsed_s:.1f} s{self.limit}"
        if self.console.is_terminal:
            if self.every_plan and state != self.last:
                self.console.print(text, highlight=False)
        elif state != self.last or phase not in self.phases:
            self.console.print(text, highlight=False, soft_wrap=True)
        self.last = state
        self.phases.add(phase)


class StatusLine(_Status):
    """A context in which `say` shows what is being done; away from a terminal it prints a line for each."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, "reading")

    def say(self, line: str) -> None:
        """Show what is done now."""
        if self.console.is_terminal:
            self.status.update(line)
        else:
            self.console.print(line, highlight=False, soft_wrap=True)


class _Clock:
    """The line as it is at the moment when it is drawn."""

    def __init__(self, line: ProgressLine) -> None:
        self.line = line

    def __rich__(self) -> Text:
        passed = int(time.monotonic() - self.line.begin)
        return Text(f"{passed} s{self.line.limit}  {self.line.state}", no_wrap=True, overflow="ellipsis")
