"""Builders of the tiny GPT that also disturb the process that they are called in: slow, stalled, short of memory."""

from __future__ import annotations

import os
import time
from functools import wraps
from random import Random


def gpt(kind: str, **config):
    """Layers of the tiny GPT, with the named disturbance switched on in this process."""
    from runtime_cases import MODEL

    from optpipe_compiler.documents.profile import Model
    from optpipe_torch.models import known as models

    DISTURBANCES[kind]()
    model = Model(builder="gpt", config=config, microbatch_size=2, sequence_length=8, seed=MODEL.seed)
    return models.build(model)


def fewer(**config):
    """One block less than the schedule is for."""
    return gpt("none", **{**config, "layers": config["layers"] - 1})


def fatter(**config):
    """Wider than the profile says."""
    return gpt("none", **{**config, "hidden": 4 * config["hidden"]})


def slow_device():
    """Every op on rank 1 takes 8 ms longer."""
    _before_ops(lambda stage: time.sleep(0.008 if stage.is_last else 0))


def stalled_copies():
    """Every copy takes 20 ms longer."""
    _before("offload", "reload", act=lambda stage: time.sleep(0.02))


def jitter():
    """Every op takes 10 ms, give or take 30 %; its own time is next to nothing."""
    random = Random(os.getpid())
    _before_ops(lambda stage: time.sleep(0.01 * random.uniform(0.7, 1.3)))


def no_host_memory():
    """No host buffer can be had."""

    def refuse(_stage):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: 1 GB\nmore"
        )

    _before("offload", act=refuse)


DISTURBANCES = {
    "none": lambda: None,
    "slow_device": slow_device,
    "stalled_copies": stalled_copies,
    "jitter": jitter,
    "no_host_memory": no_host_memory,
}


def _before_ops(act):
    _before("forward", "backward", "backward_input", "backward_weight", "recompute", "offload", "reload", act=act)


def _before(*names, act):
    from runtime_torch.execution import StageExecution

    for name in names:
        setattr(StageExecution, name, _acting_first(getattr(StageExecution, name), act))


def _acting_first(method, act):
    if hasattr(method, "__wrapped__"):
        return method

    @wraps(method)
    def disturbed(self, *arguments, **options):
        act(self)
        return method(self, *arguments, **options)

    return disturbed
