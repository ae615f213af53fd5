"""The parent's side of a search: starts the child, passes its improvements on, ends it in time."""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from optpipe_compiler.solver.worker import Event, Request

if TYPE_CHECKING:
    from collections.abc import Callable

GRACE_S = 1.0


def search(request: Request, on_event: Callable[[Event], None], stop_at: float) -> str:
    """Run `request`, calling `on_event` for each Event; return the final status name.

    Ends the child when `time.monotonic()` passes `stop_at` (status "KILLED") or when `on_event` raises, as it does on
    KeyboardInterrupt. A child that dies by itself (out of memory) gives "DIED".
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "optpipe_compiler.solver.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    events: queue.Queue[Event | None] = queue.Queue()
    reader = threading.Thread(target=_read, args=(child, events), daemon=True)
    reader.start()
    try:
        pickle.dump(request, child.stdin)
        child.stdin.close()
        while True:
            try:
                event = events.get(timeout=max(0.01, min(0.5, stop_at + GRACE_S - time.monotonic())))
            except queue.Empty:
                if time.monotonic() > stop_at + GRACE_S and not request.reproducible:
                    return "KILLED"
                on_event(Event("tick"))
                continue
            if event is None:
                return "DIED"
            on_event(event)
            if event.kind == "end":
                return event.text
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        reader.join()


def _read(child: subprocess.Popen[bytes], events: queue.Queue[Event | None]) -> None:
    assert child.stdout is not None
    try:
        while True:
            events.put(pickle.load(child.stdout))
    except (EOFError, pickle.UnpicklingError, ValueError, OSError):
        events.put(None)
