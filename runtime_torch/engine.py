"""Calls of torch that have a faster, private way: taken where this torch has it, and never needed.

Autograd's engine is then called without the checks around it, which cost more host time than many a kernel's launch:
the callers here know what they pass, edges with gradients of their shape and dtype. docs/OVERHEAD.md has both ways.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd import graph

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, UntypedStorage
    from torch.autograd.graph import GradientEdge
    from torch.nn import Module, Parameter

    RunBackward = Callable[..., tuple[Tensor | None, ...]]

Hook = TypeVar("Hook", bound="Callable[..., Any]")
"""A function that torch calls."""


def _private(owner: Any, *path: str) -> Any:
    """What is at `path`; None where this torch does not have it."""
    for name in path:
        owner = getattr(owner, name, None)
    return owner


def _probed(run_backward: RunBackward | None) -> RunBackward | None:
    """The function, where it does on three numbers what the callers below count on; else None."""
    if run_backward is None:
        return None
    leaf = torch.ones((), requires_grad=True)
    edge, seed = graph.get_gradient_edge(leaf * 2), torch.ones(())
    try:
        found = run_backward((edge,), (seed,), True, False, (leaf,), True, accumulate_grad=False)
        run_backward((edge,), (seed.double().expand(3),), False, False, (), True, accumulate_grad=True)
    except (TypeError, RuntimeError):
        return None
    return run_backward if leaf.grad is not None and found[0] == 2 and leaf.grad == 6 else None


_run_backward: RunBackward | None = _probed(_private(graph, "_engine_run_backward"))
_profiler_enabled: Callable[[], bool] | None = _private(torch, "_C", "_autograd", "_profiler_enabled")
_use_count: Callable[[int], int] | None = _private(torch, "_C", "_storage_Use_Count")
_copy_each: Callable[..., None] | None = _private(torch, "_foreach_copy_")
_flash: dict[str, Any] = {
    kind: _private(torch, "ops", "aten", f"_scaled_dot_product_flash_attention{suffix}")
    for kind, suffix in (
        ("cpu", "_for_cpu"),
        ("cpu backward", "_for_cpu_backward"),
        ("cuda", ""),
        ("cuda backward", "_backward"),
    )
}
_frames = _private(torch, "_C", "_dynamo", "eval_frame")
_hooks: str | None = "_backward_hooks"
_base: str | None = "_base"


def use_public_names() -> None:
    """Do without the private names from now on."""
    global _run_backward, _profiler_enabled, _use_count, _hooks, _base, _copy_each
    _run_backward = _profiler_enabled = _use_count = _hooks = _base = _copy_each = None
    _flash.clear()


def accumulate(
    edges: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    into: Sequence[Tensor | GradientEdge] = (),
    *,
    retain: bool = False,
) -> None:
    """Run backward from `edges` and free their graph, unless `retain`; add to `.grad` of the leaves, or of those in
    `into` alone."""
    edges, gradients, into = tuple(edges), tuple(gradients), tuple(into)
    if _run_backward is None:
        torch.autograd.backward(edges, gradients, inputs=into or None, retain_graph=retain)  # type: ignore[arg-type]
    else:
        _run_backward(edges, gradients, retain, False, into, True, accumulate_grad=True)


def refuses_broadcast() -> bool:
    """Whether `accumulate` takes gradients only in shape and dtype of what they belong to, and reduces no others."""
    return _run_backward is None


def capture(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], of: Sequence[Tensor | GradientEdge], *, retain: bool
) -> tuple[Tensor | None, ...]:
    """Run backward from `edges` and return the gradients of `of`, None where there is no way to it; with `retain` the
    graph stays for another backward."""
    if _run_backward is None:
        return torch.autograd.grad(
            tuple(edges),
            tuple(of),  # type: ignore[arg-type]
            tuple(gradients),
            retain_graph=retain,
            allow_unused=True,
        )
    return _run_backward(tuple(edges), tuple(gradients), retain, False, tuple(of), True, accumulate_grad=False)


def flash_kernels(kind: str) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the flash kernel of a kind of device, which also says the logsumexp, and its backward, which takes it."""
    forward, backward = _flash.get(kind), _flash.get(f"{kind} backward")
    return None if forward is None or backward is None else (forward, backward)


def without_data() -> AbstractContextManager[object] | None:
    """Return within what tensors have a device, shape and dtype and no data; None where this torch has no such mode."""
    with suppress(ImportError):
        mode = _private(import_module("torch._subclasses.fake_tensor"), "FakeTensorMode")
        return None if mode is None else cast("AbstractContextManager[object]", mode(allow_non_fake_inputs=True))
    return None


def never_compiled(function: Hook) -> Hook:
    """Keep torch.compile from tracing a function, and what it calls: it would do so where a compiled layer runs a piece
    eagerly, anew for each layer, and warn of that."""
    with suppress(TypeError, AttributeError):
        skip = _frames._FrameAction.SKIP
        _frames.set_code_exec_strategy(function.__code__, _frames._FrameExecStrategy(skip, skip))
    return function


def is_in_composable_ddp(module: Module) -> bool:
    """Whether DDP looks after a module by hooks, without being one; False where that cannot be told."""
    kind = _private(sys.modules.get("torch.distributed._composable.replicate"), "DDP")
    return isinstance(kind, type) and isinstance(module, kind)


def is_sharded_with_others(module: Module) -> bool:
    """Whether one call of `fully_shard` was given this module and others; False where that cannot be told."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    return len(_private(state, "_modules") or ()) > 1


def forget_unreduced(module: Module) -> None:
    """Let go the gradients of a module of FSDP2 that it took over in another dtype and did not reduce."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = _private(state, "_fsdp_param_groups") or [_private(state, "_fsdp_param_group")]
    for parameter in (one for group in groups for one in _private(group, "fsdp_params") or ()):
        with suppress(AttributeError):  # since torch 2.15 what says the gradient that the parameter itself has
            parameter.unsharded_accumulated_grad = None


def is_compiled(module: Module) -> bool:
    """Whether `module.compile()` was called, of which torch shows nothing, and of which copies know nothing."""
    return getattr(module, "_compiled_call_impl", None) is not None


def uncompiled(module: Module) -> Module:
    """Return the module in one of torch.compile; any other as it is."""
    found: Module = getattr(module, "_orig_mod", module)
    return found


def is_profiled() -> bool:
    """Whether a profiler listens to this thread, or may do so."""
    return _profiler_enabled is None or _profiler_enabled()


def references(storage: UntypedStorage) -> int | None:
    """Return how many objects keep the storage alive, `storage` itself included; None where that cannot be told."""
    return None if _use_count is None else _use_count(storage._cdata)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long a group (None: the default one) waits for a message; None where that cannot be told."""
    backend = _private(dist.group.WORLD if group is None else group, "_get_backend")
    found = None if backend is None else _private(backend(torch.device("cpu")), "options", "_timeout")
    return found if isinstance(found, timedelta) else None


def is_hooked(parameter: Tensor) -> bool:
    """Whether hooks look at the gradient of a parameter, or may do so."""
    return _hooks is None or bool(getattr(parameter, _hooks, True))


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks of any kind look at the gradient of a parameter; False where that cannot be told."""
    return _hooks is not None and any(
        getattr(parameter, name, None) for name in (_hooks, "_post_accumulate_grad_hooks")
    )


def gradient_dtype(parameter: Tensor) -> torch.dtype | None:
    """Return the dtype that a parameter's gradient has, which may be another one than its own; None: any."""
    found: torch.dtype | None = getattr(parameter, "grad_dtype", parameter.dtype)
    return found


def with_gradients_in(parameter: Parameter, dtype: torch.dtype | None) -> Parameter:
    """Return the parameter, which has gradients of this dtype from now on."""
    if dtype != parameter.dtype:
        parameter.grad_dtype = dtype
    return parameter


def no_gradient(parameter: Tensor) -> Tensor:
    """Return zeros as a gradient of the parameter."""
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter) or parameter.dtype)


def base_of(tensor: Tensor) -> Tensor:
    """Return what a tensor is a view of; itself where it is no view, or where that cannot be told."""
    found: Tensor | None = None if _base is None else getattr(tensor, _base, None)
    return tensor if found is None else found


def changes(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 where torch does not say, as of one of `inference_mode`."""
    try:
        return tensor._version
    except (AttributeError, RuntimeError):
        return 0


def copy_all(there: Sequence[Tensor], here: Sequence[Tensor]) -> None:
    """Copy tensors, where the other side is a pinned host without waiting for it.

    In one call: between two of them a thread that computes may have the interpreter's lock.
    """
    if _copy_each is not None and there:
        _copy_each(there, here, non_blocking=True)
        return
    for to, source in zip(there, here, strict=True):
        to.copy_(source, non_blocking=True)
