"""From a timed schedule in ns and bytes to the contract and forecast of the schedule file.

`graph` orders ops and messages, `waits` adds what memory and data need, `emit` writes the records.
"""

from __future__ import annotations

from optpipe_compiler.lower.emit import Certificate, lower, promised

__all__ = ["Certificate", "lower", "promised"]
