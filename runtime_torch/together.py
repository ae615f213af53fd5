"""What is wrong on one rank is raised on all, before any of them begins what the others would wait in."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from optpipe_compiler.errors import BadInput, OptPipeError, RunFailed

if TYPE_CHECKING:
    from collections.abc import Iterator


def go_on(
    error: Exception | None, group: dist.ProcessGroup | None, device: torch.device, *, asks: bool = False
) -> bool:
    """Raise on all ranks of `group` what keeps any of them from a step; else return whether any of them `asks`."""
    if dist.get_world_size(group) > 1:
        votes = torch.tensor([error is not None, asks], dtype=torch.int32, device=device)
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
        failed, asked = votes.tolist()
        if failed:
            raise_together(error, group)
        return bool(asked)
    if error is not None:
        raise error
    return asks


@contextmanager
def raised_on_all(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Within: what each rank of `group` does by itself. An error on any of them is raised on all, at its end."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    go_on(error, group, device)


def raise_together(error: Exception | None, group: dist.ProcessGroup | None) -> NoReturn:
    """Raise this rank's error, or where it has none that of another rank; called by all where any has one."""
    kind: type[OptPipeError] = BadInput if isinstance(error, BadInput) else RunFailed
    said = str(error) if isinstance(error, OptPipeError) else f"{type(error).__name__}: {error}"
    found: list[tuple[type[OptPipeError], str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, None if error is None else (kind, said), group=group)
    if error is not None:
        raise error
    rank, (kind, said) = next((rank, one) for rank, one in enumerate(found) if one is not None)
    raise kind(f"rank {rank}: {said}")


def told(error: BaseException | None, what: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Tell the other ranks of `group` whether `what` all did ended with an error on this one; where it did on another,
    raise RunFailed. Who has failed does not wait: others may wait for its messages, and not hear it yet."""
    if dist.get_world_size(group) == 1:
        return
    with suppress(RuntimeError) if error is not None else nullcontext():  # where another rank has gone, or a GPU
        votes = torch.zeros(dist.get_world_size(group), dtype=torch.int32, device=device)
        votes[dist.get_rank(group)] = error is not None
        dist.all_reduce(votes, group=group, async_op=error is not None)
        if error is not None:
            return
    if failed := [str(rank) for rank, vote in enumerate(votes.tolist()) if vote]:
        raise RunFailed(f"{what} failed on rank {', '.join(failed)}, where its error is", elsewhere=True)
