"""Commands in processes of their own, each with a time limit; what they print goes to one log."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

OPTPIPE = (sys.executable, "-m", "optpipe_compiler.cli")


class Failed(Exception):
    """A command failed, or could not be run; says why in one sentence. `printed`: its standard output so far."""

    def __init__(self, sentence: str, printed: str = "") -> None:
        super().__init__(sentence)
        self.printed = printed


class Commands:
    """Runs commands within `budget_s` seconds in all and writes them, with all that they print, to `log`."""

    def __init__(self, log: Path, budget_s: float) -> None:
        self._log = log
        self._deadline = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._deadline - time.monotonic()

    def run(self, command: Sequence[object], limit_s: float, environment: Mapping[str, str] | None = None) -> str:
        """Return what the command prints on its standard output; raise Failed where it does not end well in time."""
        words = [str(word) for word in command]
        limit = min(limit_s, self.left_s)
        name = shlex.join(_short(words))
        if limit <= 0:
            raise Failed(f"{name}: not started, no time is left")
        begin = time.monotonic()
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environment or {}),
            start_new_session=True,
        )
        late = False
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            late = True
            _end(process)
            out, err = process.communicate()
        except BaseException:
            _end(process)
            raise
        took = time.monotonic() - begin
        self._write(f"$ {shlex.join(words)}\n{out}{err}[{took:.1f} s, exit code {process.returncode}]\n\n")
        if late:
            raise Failed(f"{name}: ended after {limit:.0f} s, its limit", out)
        if process.returncode:
            raise Failed(f"{name}: exit code {process.returncode}: {_last_line(err) or _last_line(out)}", out)
        return out

    def _write(self, text: str) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(text)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _short(words: Sequence[str]) -> list[str]:
    """Say `optpipe` and `python -m` for this interpreter, in sentences."""
    if tuple(words[:3]) == OPTPIPE:
        return ["optpipe", *words[3:]]
    return ["python", *words[1:]] if words[0] == sys.executable else list(words)


def _last_line(text: str) -> str:
    return next((line.strip()[:300] for line in reversed(text.splitlines()) if line.strip()), "")
