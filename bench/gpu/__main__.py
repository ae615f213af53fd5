"""`sh bench/gpu.sh [--dry-run] [--out DIR] [--work DIR] [--budget SECONDS] [PART ...]`; parts: see below.

Without parts, all of them: tests, profile, plans, check, emulate, limit, trace, stock. Later ones need the profile
and the plans, which stay in the work folder. Writes gpu.json, gpu.md, gpu.log, files.zip (profiles and plans), stock.md
and a trace of torch's profiler; what is already there of other parts is kept. Ends with exit code 1 where anything
failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.commands import Commands, Failed
from bench.gpu.page import page
from bench.gpu.parts import PARTS, ROOT, Bench
from bench.gpu.sizes import DRY, ON_GPUS

if TYPE_CHECKING:
    from collections.abc import Callable

LARGEST_BYTES = 16 * 2**20
"""Of a file in the output folder."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    parts: list[str]
    dry_run: bool
    out: Path
    work: Path
    budget: float


def options(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} [default: all]")
    parser.add_argument("--dry-run", action="store_true", help="the same on a CPU, with small models")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="the folder for what is found")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "gpu-work", help="the folder for profiles and plans"
    )
    parser.add_argument("--budget", type=float, default=900, metavar="SECONDS", help="for all parts [default: 900]")
    given = parser.parse_args(arguments)
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"PART is {unknown[0]}, expected one of {', '.join(PARTS)}")
    return Options(**vars(given))


def run(chosen: Options) -> dict[str, Any]:
    """Run the parts, and write what is known after each of them."""
    for folder in (chosen.out, chosen.work):
        folder.mkdir(parents=True, exist_ok=True)
    found = _known(chosen.out / "gpu.json")
    found["command"] = "sh bench/gpu.sh" + " --dry-run" * chosen.dry_run
    found["when"] = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    log = chosen.work / "gpu.log"
    log.write_text("", encoding="utf-8")
    commands = Commands(log, chosen.budget)
    bench = Bench(DRY if chosen.dry_run else ON_GPUS, commands, chosen.work, chosen.out)
    for name, part in PARTS.items():
        if not chosen.parts or name in chosen.parts or name == "machine":
            begin, bench.failures = time.monotonic(), []
            print(f"{name} ...", flush=True)
            result = _attempt(part, bench)
            took = time.monotonic() - begin
            found["parts"][name] = {"found": result, "failures": bench.failures, "seconds": round(took, 1)}
            for failure in bench.failures:
                print(f"  failed: {failure}")
            print(f"  {took:.1f} s", flush=True)
            _write(chosen, found)
    return found


def _attempt(part: Callable[[Bench], dict[str, Any]], bench: Bench) -> dict[str, Any] | None:
    """Return what a part finds; what it raises, also where it cannot read an answer, is its failure, not the run's."""
    try:
        return part(bench)
    except Failed as error:
        bench.failures.append(str(error))
    except Exception as error:
        bench.failures.append(f"{type(error).__name__}: {error}")
    return None


def _known(path: Path) -> dict[str, Any]:
    """Return what earlier runs of other parts found."""
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    return known


def _write(chosen: Options, found: dict[str, Any]) -> None:
    """Write the output folder anew; a file that is too large is left out, and the log loses its begin."""
    (chosen.out / "gpu.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (chosen.out / "gpu.md").write_text(page(found), encoding="utf-8")
    (chosen.out / "gpu.log").write_bytes((chosen.work / "gpu.log").read_bytes()[-LARGEST_BYTES:])
    with zipfile.ZipFile(chosen.out / "files.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(chosen.work.glob("*.json")):
            archive.write(path, path.name)
    for path in chosen.out.iterdir():
        if path.stat().st_size > LARGEST_BYTES:
            path.unlink()
            print(f"  {path.name} is larger than {LARGEST_BYTES} bytes: removed")


def main() -> None:
    """Run, and say what failed."""
    chosen = options()
    found = run(chosen)
    failures = [(part, failure) for part, about in found["parts"].items() for failure in about["failures"]]
    print(f"wrote {chosen.out}; {len(failures) or 'nothing'} failed")
    for part, failure in failures:
        print(f"- {part}: {failure}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
