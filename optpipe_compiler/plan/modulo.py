"""A modulo schedule of our own, a steady state without bubbles: every device repeats forward, input, weight gradient.

A device runs a triple (F, I, W) every `tau` ticks, and device d is `sigma` ticks times d behind device 0. A message to
the next device then takes `sigma` ticks, one to the previous device `tau - sigma`, whatever it carries, and nothing
ever waits. A microbatch takes each stage of a device through triples of its own; `group` microbatches in a row go
through one stage before the device turns to the next stage, as in grouped interleaving (arXiv:2503.01328), with 1 the
least memory and with the number of devices the shortest way for one microbatch. What the triples say is a wish: the
times become the ranks of the list scheduler, which packs the fill and the drain and minds memory and links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from optpipe_compiler.model.problem import Problem
    from optpipe_compiler.model.schedule import Ints


def modulo(problem: Problem, group: int, forwards_first: bool) -> Ints:
    """Return wished starts [k, stage, microbatch] of forwards, backwards and weight gradients.

    With `forwards_first` messages to the next device are the quick ones, else those to the previous device.
    """
    stages = problem.stages
    forward, middle, last = (
        max(getattr(s, n) for s in stages) for n in ("forward", "backward_input", "backward_weight")
    )
    tau = max(1, forward + middle + last)
    quick = min(tau, max(forward, middle) + max(max(s.send_activation, s.send_gradient) for s in stages))
    sigma = quick if forwards_first else tau - quick
    forward_grid, backward_grid = (_Grid(problem, tau, sigma, group) for _ in range(2))
    there, back = [], []
    time = 0
    for s, stage in enumerate(stages):
        there.append(forward_grid.place(s, time, 0))
        time = forward_grid.at(s, there[-1]) + stage.forward + stage.send_activation
    time = int(forward_grid.times(len(stages) - 1, there[-1])[problem.slices - 1]) + stages[-1].forward
    for s in reversed(range(len(stages))):
        back.append(backward_grid.place(s, time, forward))
        time = backward_grid.at(s, back[-1]) + forward + stages[s].backward_input + stages[s].send_gradient
    back.reverse()
    forwards = np.array([forward_grid.times(s, triple) for s, triple in enumerate(there)])
    positions = [*map(problem.back, range(problem.microbatches))]
    backwards = np.array([backward_grid.times(s, triple) for s, triple in enumerate(back)])[:, positions]
    return np.stack([forwards, backwards + forward, backwards + forward + middle])


class _Grid:
    """The triples of all devices, and which of them the stages of a device have taken."""

    def __init__(self, problem: Problem, tau: int, sigma: int, group: int) -> None:
        self.problem = problem
        self.tau, self.sigma, self.group = tau, sigma, group
        self.turns = [len(problem.stages_of(device)) for device in range(problem.devices)]
        self.taken: list[list[int]] = [[] for _ in self.turns]

    def at(self, s: int, triple: int) -> int:
        """Return when a triple of the stage's device begins."""
        return triple * self.tau + self.problem.stages[s].device * self.sigma

    def place(self, s: int, time: int, offset: int) -> int:
        """Take, for microbatch 0, the first free triple whose op at `offset` starts at `time` or later."""
        device = self.problem.stages[s].device
        taken = self.taken[device]
        triple = -((self.at(s, 0) + offset - time) // self.tau)
        while taken and not self._fits(device, triple - taken[0]):
            triple += 1
        taken.append(triple)
        return triple

    def _fits(self, device: int, distance: int) -> bool:
        """Whether a stage that begins so many triples after the first one meets no stage of the device."""
        first, blocks = self.taken[device][0], self.turns[device]
        used = {(triple - first) // self.group % blocks for triple in self.taken[device]}
        return distance % self.group == 0 and distance // self.group % blocks not in used

    def times(self, s: int, triple: int) -> Ints:
        """Return when the triples of all microbatches begin."""
        turns, place = np.divmod(np.arange(self.problem.microbatches), self.group)
        triples = triple + turns * self.group * self.turns[self.problem.stages[s].device] + place
        return triples * self.tau + self.at(s, 0)
