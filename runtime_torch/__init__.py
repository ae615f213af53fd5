"""Replay of a schedule file on torch.

In a training loop: `load_schedule`, `build_stages` from layers (or `wrap_stages` around stage modules), `Runner(...)`,
then `runner.step(inputs, target=target)`. Importing this package alone does not import torch. `DecoderLayer` and
`vocabulary`, layers for a loop's own models, lie in `optpipe_torch` and are here by their names alone.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from optpipe_compiler.errors import MissingDependency

if TYPE_CHECKING:
    from optpipe_compiler.documents.ir import load as load_schedule
    from runtime_torch.microbatch import add_loss
    from runtime_torch.replay import StepResult
    from runtime_torch.runner import Runner
    from runtime_torch.selective import cheap
    from runtime_torch.slices import WHOLE, Carry
    from runtime_torch.stages import build_stages, wrap_stages

__all__ = [
    "WHOLE",
    "Carry",
    "DecoderLayer",
    "Runner",
    "StepResult",
    "add_loss",
    "build_stages",
    "cheap",
    "load_schedule",
    "vocabulary",
    "wrap_stages",
]

_HOMES = {
    "WHOLE": ("runtime_torch.slices", "WHOLE"),
    "Carry": ("runtime_torch.slices", "Carry"),
    "DecoderLayer": ("optpipe_torch.frameworks.decoder", "DecoderLayer"),
    "Runner": ("runtime_torch.runner", "Runner"),
    "StepResult": ("runtime_torch.replay", "StepResult"),
    "add_loss": ("runtime_torch.microbatch", "add_loss"),
    "build_stages": ("runtime_torch.stages", "build_stages"),
    "cheap": ("runtime_torch.selective", "cheap"),
    "load_schedule": ("optpipe_compiler.documents.ir", "load"),
    "vocabulary": ("optpipe_torch.models.vocabulary", ""),
    "wrap_stages": ("runtime_torch.stages", "wrap_stages"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency("running a schedule needs torch: pip install 'optpipe[runtime]'")
    module, attribute = _HOMES[name]
    home = importlib.import_module(module)
    return getattr(home, attribute) if attribute else home
