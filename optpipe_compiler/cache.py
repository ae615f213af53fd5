"""Plans that were made before, in the user's cache folder: equal questions are answered, near ones start from them.

A question is the digest of a profile, options and version. A file is named by the digest of what near questions have in
common (devices, layers, freedoms), and by that of its question; it holds a line about itself and the schedule. Files
are written to another name and renamed, so that any number of processes may read and write them. What is read is judged
again; what does not hold is removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from optpipe_compiler import __version__, compiler
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import write_atomically
from optpipe_compiler.documents.profile import Profile, value_of
from optpipe_compiler.errors import BadInput
from optpipe_compiler.forecast.executions import Quantiles
from optpipe_compiler.verify import Violated, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from optpipe_compiler.compiler import Options, Progress, Result, Settled

MOST_BYTES = 500 * 10**6
"""Of all plans together; those that were not used for the longest time are removed beyond it."""
NEAR = 0.3
"""Costs are near that differ by no more than this share: a plan for others is rarely better than a new one."""
NEIGHBOURS = 2
"""Near plans to start from at most, the nearest first."""
FOLDER = "OPTPIPE_CACHE"
"""The environment's variable that names another folder; empty: nothing is kept."""
SUFFIX = ".plan"
NAME = re.compile(rf"[0-9a-f]+-[0-9a-f]+{re.escape(SUFFIX)}")
"""Of a file that holds a plan; others in the folder, which the user has named, are left alone."""


class AboutPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of a file."""

    version: str
    profile: str
    """The profile's name."""
    profile_digest: str
    devices: int
    microbatches: int
    mem_bytes: int
    host_mem_bytes: int | None
    objective: str
    value_ns: int
    peak_bytes: int
    host_bytes: int
    outcome: str
    wall_s: float
    halfway_ns: int | None
    """What had been found when half of the time limit had passed."""
    costs: list[float]
    """Times, sizes and speeds, for the distance to other costs."""
    quantiles_ns: tuple[int, int] | None = None
    """What half of the steps take with noise, and 95% of them; None where no noise is known."""
    digest: str = ""
    """Of the schedule."""
    starts: list[str] = []
    """The digests of the schedules from which its search started."""
    text_digest: str = ""
    """Of the schedule's canonical text, which a file that is as it was written has; empty: not known."""
    notes: list[str] = []
    """What was to be said of how it was planned."""
    left_ns: int | None = None
    """The forecast of a shorter plan that was left since it is late more often under noise."""


@dataclass(frozen=True)
class Entry:
    """One plan that is kept."""

    path: Path
    about: AboutPlan
    size_bytes: int
    used_s: float
    """When it was last read or written; seconds since the epoch."""

    def is_news_for(self, answer: Entry) -> bool:
        """Whether this plan has a better forecast than an answer, which did not start from it.

        An answer that did was chosen for its steps with noise.
        """
        return self.about.value_ns < answer.about.value_ns and self.about.digest not in answer.about.starts


class Cache:
    """The plans of one folder."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most_bytes = most_bytes

    def entries(self, family: str = "") -> list[Entry]:
        """Return what is kept, of one family or all; the latest used first."""
        found = []
        for path in self._files(family):
            with suppress(OSError, ValueError, RecursionError):  # as well as text that is no JSON, or not UTF-8
                with path.open("rb") as file:
                    about = msgspec.json.decode(file.readline(), type=AboutPlan)
                status = path.stat()
                found.append(Entry(path, about, status.st_size, status.st_mtime))
        return sorted(found, key=lambda entry: (-entry.used_s, entry.path.name))

    def read(self, entry: Entry, profile: Profile | None) -> ir.Checked | None:
        """Return a plan that the judge passes, with these costs if they are given; remove one that it does not."""
        try:
            text = entry.path.read_bytes().partition(b"\n")[2].decode("utf-8")
            found = check(ir.parse(text, str(entry.path)), profile)
        except OSError:  # another process has removed it
            return None
        except (BadInput, Violated, UnicodeDecodeError):
            self._remove(entry.path)
            return None
        with suppress(OSError):
            os.utime(entry.path)
        is_as_written = _text_digest(text) == entry.about.text_digest
        return replace(found, known_text=text) if is_as_written else found

    def write(self, name: str, about: AboutPlan, checked: ir.Checked) -> None:
        """Keep a plan, and no more than there is room for; where nothing can be written nothing is kept."""
        with suppress(OSError, BadInput):
            self.folder.mkdir(parents=True, exist_ok=True)
            line = msgspec.json.encode(about) + b"\n"
            write_atomically(self.folder / f"{name}{SUFFIX}", line + checked.text.encode())
            self._shrink()

    def clear(self) -> int:
        """Remove all plans; return how many there were."""
        return sum(map(self._remove, self._files()))

    def _files(self, family: str = "") -> list[Path]:
        """Return the files of plans; none where the folder cannot be looked into."""
        try:
            return [path for path in self.folder.glob(f"{family}*{SUFFIX}") if NAME.fullmatch(path.name)]
        except OSError:
            return []

    def _shrink(self) -> None:
        files = []
        for path in self._files():
            with suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        over = sum(size for _, size, _ in files) - self.most_bytes
        for _, size, path in sorted(files)[:-1]:
            if over <= 0:
                return
            over -= size * self._remove(path)

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except OSError:
            return False
        return True


def users() -> Cache | None:
    """Return the user's cache; None where the environment says that nothing is kept, or where there is no home."""
    named = os.environ.get(FOLDER)
    if named is not None:
        return Cache(Path(named)) if named else None
    try:
        return Cache(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optpipe" / "plans")
    except RuntimeError:
        return None


def compile_schedule(
    profile: Profile,
    options: Options,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    cache: Cache | None = None,
) -> Result:
    """Plan as `compiler.compile_schedule`, with what the cache knows; keep the answer.

    An equal question has its answer back. Any other starts from near plans: of the same costs the best that fits, so
    that more memory is never worse than less, and of near costs, caps and microbatches the nearest. With
    `reproducible` only an equal question is answered, because a start would change the answer. One schedule alone
    (`method`) is not kept, nor are plans for a longer step (`further`), or while schedules of one's own are registered.
    """
    from optpipe_compiler.published import METHODS

    is_own = any(method.kind == "own" for method in METHODS.values())
    if cache is None or options.method is not None or options.further or is_own:
        return compiler.compile_schedule(profile, options, on_progress)
    begin = time.monotonic()
    chosen = compiler.settled(profile, options)
    question = _Question(profile, chosen)
    known = cache.entries(question.family)
    best = None if chosen.reproducible else question.best(known)
    for entry in known:
        if entry.path.stem == question.name and (best is None or not best.is_news_for(entry)):
            found = cache.read(entry, profile)
            if found is not None:
                return _again(found, profile, chosen, entry.about, time.monotonic() - begin, on_progress)
    seeds = () if chosen.reproducible else tuple(question.starts(cache, known))
    halfway = Halfway(chosen.time_limit_s, on_progress)
    result = compiler.compile_schedule(profile, replace(chosen, kept=seeds), halfway.see, begin)
    if not result.interrupted:
        cache.write(question.name, question.about(result, halfway.value_ns, seeds), result.checked)
    return replace(result, options=chosen)


def _again(
    found: ir.Checked,
    profile: Profile,
    options: Options,
    about: AboutPlan,
    wall_s: float,
    on_progress: Callable[[Progress], None],
) -> Result:
    """Return a kept answer; who listens hears what had been found halfway and at the end, as in the search.

    What was to be said of it is said again.
    """
    forecast = found.schedule.forecast
    for value, elapsed_s in ((about.halfway_ns, 0.0), (about.value_ns, about.wall_s)):
        on_progress(compiler.Progress("cache", value, forecast.lower_bound_ns, forecast.method, elapsed_s))
    placement = compiler.placement_of(found.schedule)
    noisy = None if about.quantiles_ns is None else Quantiles(*about.quantiles_ns)
    notes = tuple(dict.fromkeys([*about.notes, *compiler.left_out(found.schedule, profile)]))
    return compiler.Result(
        found, options, placement, False, wall_s, notes, noisy, is_cached=True, left_before_ns=about.left_ns
    )


class Halfway:
    """Remembers what had been found when half of the time limit had passed."""

    def __init__(self, limit_s: float, on_progress: Callable[[Progress], None] = lambda progress: None) -> None:
        self.limit_s = limit_s
        self.on_progress = on_progress
        self.value_ns: int | None = None

    def see(self, progress: Progress) -> None:
        """Hear how the search stands."""
        if progress.elapsed_s <= self.limit_s / 2 and progress.incumbent_ns is not None:
            self.value_ns = progress.incumbent_ns
        self.on_progress(progress)


class _Question:
    """A profile and settled options, as the cache names and compares them."""

    def __init__(self, profile: Profile, options: Settled) -> None:
        self.profile = profile
        self.options = options
        self.profile_digest = profile.digest()
        self.costs = costs_of(profile)
        asked = compiler.recorded(options)
        varies = ("mem_bytes", "host_mem_bytes", "microbatches", "time_limit_s", "seed", "reproducible")
        common = {name: value for name, value in asked.items() if name not in varies}
        layers = len(profile.expanded_layers())
        self.family = _digest(ir.FORMAT, ir.VERSION, layers, sorted(common.items()), options.units, options.lengths)
        starts = [seed.schedule.digest for seed in options.seeds]
        exact = (self.profile_digest, sorted(asked.items()), options.search, options.workers, starts, planner())
        self.name = f"{self.family}-{_digest(*exact)}"

    def about(self, result: Result, halfway_ns: int | None, starts: Sequence[ir.Checked]) -> AboutPlan:
        """Return what is said of an answer whose search began with some kept plans."""
        schedule, forecast, noisy = result.schedule, result.schedule.forecast, result.quantiles
        return AboutPlan(
            version=__version__,
            profile=self.profile.name,
            profile_digest=self.profile_digest,
            devices=schedule.setup.devices,
            microbatches=schedule.setup.microbatches,
            mem_bytes=schedule.setup.cap_bytes,
            host_mem_bytes=schedule.setup.host_cap_bytes,
            objective=forecast.objective,
            value_ns=forecast.value_ns,
            peak_bytes=max(device.peak_bytes for device in schedule.devices),
            host_bytes=sum(device.host_bytes for device in schedule.devices),
            outcome=forecast.outcome,
            wall_s=round(result.wall_s, 3),
            halfway_ns=halfway_ns,
            costs=self.costs,
            quantiles_ns=None if noisy is None else (noisy.p50_ns, noisy.p95_ns),
            digest=schedule.digest,
            starts=[one.schedule.digest for one in starts],
            text_digest=_text_digest(result.checked.text),
            notes=list(result.notes),
            left_ns=result.left_ns,
        )

    def is_answered_by(self, entry: Entry) -> bool:
        """Whether a plan is one for this question, whatever it was made for."""
        about, options = entry.about, self.options
        return (
            about.profile_digest == self.profile_digest
            and about.microbatches == options.microbatches
            and about.peak_bytes <= options.mem_bytes
            and (options.host_mem_bytes is None or about.host_bytes <= options.host_mem_bytes)
        )

    def best(self, known: list[Entry]) -> Entry | None:
        """Return the plan of the least forecast of those that are an answer."""
        return min(filter(self.is_answered_by, known), key=lambda entry: entry.about.value_ns, default=None)

    def starts(self, cache: Cache, known: list[Entry]) -> Iterator[ir.Checked]:
        """Yield plans to start from: the best that is an answer, then the nearest others."""
        best = self.best(known)
        others = [entry for entry in known if not self.is_answered_by(entry) and self._distance(entry)[0] <= NEAR]
        found = 0
        for entry in chain([] if best is None else [best], sorted(others, key=self._distance)):
            if found < NEIGHBOURS and (seed := cache.read(entry, None)) is not None:
                found += 1
                yield seed

    def _distance(self, entry: Entry) -> tuple[float, float]:
        """Return the largest relative difference of a cost, and how far cap and microbatches are."""
        about = entry.about
        if len(about.costs) != len(self.costs):
            return float("inf"), 0.0
        pairs = zip(about.costs, self.costs, strict=True)
        costs = max((abs(a - b) / max(a, b) for a, b in pairs if max(a, b) > 0), default=0.0)
        microbatches = self.options.microbatches
        far = abs(about.microbatches - microbatches) / max(about.microbatches, microbatches)
        return costs, far + abs(about.mem_bytes - self.options.mem_bytes) / max(1, about.mem_bytes)


def costs_of(profile: Profile) -> list[float]:
    """Return what plans depend on most: time and saved bytes of every layer, speeds of links and messages."""
    layers = profile.expanded_layers()
    times = [
        float(value_of(one.forward_ns) + value_of(one.backward_input_ns) + value_of(one.backward_weight_ns))
        for one in layers
    ]
    sizes = [float(value_of(one.saved_bytes)) for one in layers]
    machine = profile.machine
    speeds = [float(value_of(s)) for link in machine.links for s in (link.d2h_bytes_per_s, link.h2d_bytes_per_s)]
    speeds += [0.0 if one.bytes_per_s is None else float(value_of(one.bytes_per_s)) for one in machine.p2p]
    return times + sizes + speeds


@lru_cache(maxsize=1)
def planner() -> str:
    """Return a digest of what plans: this version, its files as they are now, and the libraries that it uses."""
    room = Path(__file__).parent
    files = sorted(room.rglob("*.py"))
    states = [(str(path.relative_to(room)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    libraries = []
    for name in ("numba", "numpy", "ortools"):
        with suppress(metadata.PackageNotFoundError):
            libraries.append((name, metadata.version(name)))
    return _digest(__version__, states, libraries)


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(*parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:24]
