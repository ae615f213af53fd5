"""The entries of the memory table of docs/IR.md, for planning and for readers of files; the judge states them again.

Each is (what an op adds when it starts, what it adds when it has completed), by what holds it; what is freed is
negative. Arguments are bytes, or a planner's units, of one stage and unit (a microbatch or a slice of one): `incoming`
and `outgoing` are its input and output, whose gradients are as large; `transient` is what the op needs only while it
runs. In slices, `accumulators` are the gradients of keys and values that add up from a backward on, and `gradient` is
what is over with one.
"""

from __future__ import annotations

Holds = tuple[int, ...]
"""What is held by what holds it, in the order of HOLDERS."""
Entry = tuple[Holds, Holds]
HOLDERS = ("static", "kept", "residue", "captured", "messages", "working")
"""What holds bytes on a device: weights, optimizer state and the reserve; what forwards keep for backwards (of
recomputed layers the checkpoint), and gradients of keys and values that add up; what stays between input and weight
gradient; what an input gradient adds for it while it runs; tensors on their way between stages; what ops need only
while they run."""
NOTHING: Holds = (0,) * len(HOLDERS)


def receive(size: int) -> Entry:
    """A buffer for what comes, which the op that reads it frees."""
    return (0, 0, 0, 0, size, 0), NOTHING


def send(size: int) -> Entry:
    """A send's bytes go when it is delivered."""
    return NOTHING, (0, 0, 0, 0, -size, 0)


def forward(saved: int, incoming: int, outgoing: int, transient: int, dropped: int) -> Entry:
    """It finds its input where the message or the stage before left it; recomputed ranges give up `dropped`."""
    return (0, saved, 0, 0, outgoing, transient), (0, -dropped, 0, 0, -incoming, -transient)


def backward_input(
    saved: int,
    residue: int,
    captured: int,
    incoming: int,
    outgoing: int,
    transient: int,
    accumulators: int,
    gradient: int,
) -> Entry:
    """It finds the gradient of its output likewise; what the weight gradient reads stays."""
    taken = 0, accumulators, 0, captured, incoming, transient
    return taken, (0, -saved - gradient, residue, -captured, -outgoing, -transient)


def backward_weight(residue: int, transient: int) -> Entry:
    """The second half."""
    return (0, 0, 0, 0, 0, transient), (0, 0, -residue, 0, 0, -transient)


def backward(saved: int, incoming: int, outgoing: int, transient: int, accumulators: int, gradient: int) -> Entry:
    """Both halves in one."""
    return (0, accumulators, 0, 0, incoming, transient), (0, -saved - gradient, 0, 0, -outgoing, -transient)


def recompute(dropped: int, transient: int) -> Entry:
    """What the forward gave up is there again."""
    return (0, dropped, 0, 0, 0, transient), (0, 0, 0, 0, 0, -transient)


def offload(moved: int) -> Entry:
    """On the device; the host's bytes are taken at the start."""
    return NOTHING, (0, -moved, 0, 0, 0, 0)


def reload(moved: int) -> Entry:
    """On the device; the host's bytes are freed at the end."""
    return (0, moved, 0, 0, 0, 0), NOTHING
