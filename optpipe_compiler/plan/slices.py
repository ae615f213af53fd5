"""Where microbatches are cut into slices, and how long they are: the slicings that are searched."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from optpipe_compiler import machine
from optpipe_compiler.documents.profile import Profile, Sliceable, value_of
from optpipe_compiler.model.problem import Problem, Slicing
from optpipe_compiler.model.unit_bounds import device_work
from optpipe_compiler.plan.budget import LOWERING_SHARE, lowering_s, most_lowering_s
from optpipe_compiler.plan.cuts import Largest, layers_ns
from optpipe_compiler.plan.local_search import shortened
from optpipe_compiler.plan.wishes import treatments, wish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from optpipe_compiler.plan.options import Settled

NUMBERS = (2, 4, 8, 16, 32)
"""Slices per microbatch that `--slices auto` looks at."""
TRIED = 2
"""Of them those that are searched, beside whole microbatches. With one, the case of slices with an overhead in
tests/test_slices.py takes 13.07 ms, with two 13.00; the number that is second is the better one when it is searched for
longer (12.82)."""


def slicings(
    profile: Profile, options: Settled, build: Callable[[Slicing | None], list[Problem]]
) -> list[Slicing | None]:
    """Return the slicings that the options ask for; None: whole microbatches of the profile's length.

    `build` makes the instances with few stages per device. For `auto` the numbers of slices are taken with which the
    list scheduler is fastest on one of them, offloads, recomputations and the overhead of slices included; of equally
    fast ones the largest, which need least memory. (A case of tests/test_slices.py takes 13.0 ms; with the numbers for
    which Seq1F1B needs least memory it took 15.9.) Numbers of slices are left out with which trying published schedules
    on all placements takes more than the time limit: about those where lowering one schedule takes half of it.
    """
    if (kept := _kept(options)) is not None:
        return [kept]
    if options.slices != "auto":
        return list(cut(profile, options, options.slices))
    shortest = min(options.lengths or (profile.tokens or 1,))
    limit_s = options.time_limit_s
    most_s = min(most_lowering_s(limit_s), lowering_s(0) + LOWERING_SHARE * limit_s)
    ranked = []
    for number in NUMBERS:
        if number <= shortest:
            for slicing in cut(profile, options, number):
                for problem in build(slicing):
                    if lowering_s(problem.tasks) <= most_s:
                        work = device_work(problem)  # a few microbatches may promise less for all of them
                        ranked.append((max(_judged(problem, options), work), -number, work))
    least = min((reached for reached, *_ in ranked), default=0)
    able = [-less for _, less, work in sorted(ranked) if work <= least]  # the others compute for longer than that
    chosen = list(dict.fromkeys(able))[:TRIED]
    return [slicing for number in (1, *sorted(chosen)) for slicing in cut(profile, options, number)]


def largest(profile: Profile, options: Settled) -> Largest:
    """Return the largest microbatch that the options ask for, in as many slices as it may be cut into."""
    slices = max(NUMBERS) if options.slices == "auto" else options.slices
    if options.lengths is None or profile.tokens is None:
        return Largest(slices=slices)
    return Largest(max(Fraction(1), Fraction(max(options.lengths), profile.tokens)), slices)


def is_asked(slicing: Slicing | None, profile: Profile, options: Settled) -> bool:
    """Whether the options ask for microbatches of these lengths, and permit their number of slices."""
    if (kept := _kept(options)) is not None:
        return slicing == kept
    if options.slices not in ("auto", 1 if slicing is None else slicing.slices):
        return False
    whole = (profile.tokens,) * options.microbatches
    lengths = whole if slicing is None else slicing.lengths
    return lengths == (options.lengths or whole) and (slicing is None or slicing.tokens == profile.tokens)


def _kept(options: Settled) -> Slicing | None:
    """Return the slicing of an earlier schedule, where that is asked for."""
    return None if options.units is None else Slicing.of(options.units)


def _judged(problem: Problem, options: Settled) -> int:
    """Return about what the list scheduler reaches under the caps with the best first treatment of all activations."""
    short = shortened(problem)
    wished, x = wish(short, "modulo-1"), machine.state.machine(short)
    given = machine.policy.setting(short, wished, problem.microbatches, is_span=options.objective == "span")
    best = machine.state.NEVER // 2
    for modes in treatments(short, wished):
        for is_fused in (False, True):  # halves may hold more than the whole
            one = machine.policy.policy(short, modes)
            one.fused[:] |= is_fused
            best = min(best, machine.policy.value(x, one, given, best))
    return best


def cut(profile: Profile, options: Settled, number: int) -> Iterator[Slicing | None]:
    """Yield slices of equal tokens, and of equal time where that is another cut."""
    tokens, lengths = profile.tokens, options.lengths
    if number == 1 and (lengths is None or set(lengths) == {tokens}):
        yield None
        return
    assert tokens is not None
    shapes = sorted(set(lengths or (tokens,)))
    number_of = {length: shape for shape, length in enumerate(shapes)}
    shape_of = tuple(map(number_of.__getitem__, lengths)) if lengths else (0,) * options.microbatches
    cuts = tuple(tuple(length * k // number for k in range(number + 1)) for length in shapes)
    even = Slicing(tokens, cuts, shape_of)
    yield even
    linear, attention = _work(profile)
    timely = replace(even, cuts=tuple(_timely(length, number, tokens, linear, attention) for length in shapes))
    if timely != even:
        yield timely


def _timely(length: int, number: int, whole: int, linear: int, attention: int) -> tuple[int, ...]:
    """Return the cuts at which linear x b / S + attention x b^2 / S^2 has passed k / n of its whole, at the least."""

    def passed(end: int) -> int:
        return linear * end * whole + attention * end**2

    cuts = [0]
    for k in range(1, number):
        found = bisect_left(range(length), k * passed(length), key=lambda end: number * passed(end))
        cuts.append(min(max(found, cuts[-1] + 1), length - number + k))
    return (*cuts, length)


def _work(profile: Profile) -> tuple[int, int]:
    """Return the ns of forward and backward of all layers that grow with the tokens, and with their square."""
    slices = [layer.slices or Sliceable() for layer in profile.expanded_layers()]
    attention = sum(value_of(one.forward_attention_ns) + value_of(one.backward_input_attention_ns) for one in slices)
    return sum(layers_ns(profile)) - attention, attention
