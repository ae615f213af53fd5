"""A progress bar on stderr, shown on a terminal and silent elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import Progress, TextColumn

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from rich.console import Console
    from rich.progress import ProgressColumn


def description_column() -> TextColumn:
    """Return the column that shows a task's description as it is, without reading markup in it."""
    return TextColumn("{task.description}", markup=False)


class Bar:
    """A context around one task of a rich progress bar; away from a terminal, `say` prints lines instead."""

    def __init__(self, console: Console, *columns: ProgressColumn, description: str, total: float) -> None:
        self.console = console
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task(description, total=total)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def say(self, line: str) -> None:
        """Print a line where no bar is shown."""
        if not self.console.is_terminal:
            self.console.print(line)
