"""What a layer computes, moves and keeps, counted by running it on torch's meta device: shapes without data.

Every operation passes a dispatch mode, which notes what it does (`estimate_work`). The backward is split as the runtime
splits it (`split.py`), so what is kept between its halves is what the runtime keeps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from optpipe_compiler.documents.profile import OPS
from optpipe_torch.estimates.work import Work, kernel_of, tensors_of
from optpipe_torch.profiler.records import LayerBytes, SelectiveBytes
from runtime_torch import split
from runtime_torch.bundles import bundled
from runtime_torch.execution import through_one
from runtime_torch.microbatch import targets_for
from runtime_torch.selective import find_cheap, told_to

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from torch import UntypedStorage

    from runtime_torch.bundles import Bundle, Flow

Accumulation = Literal["torch", "fused"]


@dataclass
class Counted:
    """Work by op (forward, backward_input, backward_weight, backward, and selective: what selective recompute adds) and
    bytes of a run of layers."""

    work: dict[str, Work]
    sizes: LayerBytes
    slice: Counted | None = None
    """The same of the first of `records.SLICES` slices; None where the layer cannot be sliced."""


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation as a kernel, and which storages are alive."""

    def __init__(self, silent: Collection[UntypedStorage]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Work()
        self.draws = 0
        """How many operations drew random numbers."""
        self._silent = {storage._cdata for storage in silent}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._base = 0

    def begin(self, work: Work) -> None:
        """Note from now on into `work`; memory rises from what is alive now."""
        self.work = work
        self._base = self._alive_bytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_of((args, kwargs)):  # what was there before counts for nothing, whatever its views
            self._know(tensor, 0)
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and "attention" not in func.name():  # these always have it
            self.draws += 1
        kernel = kernel_of(func, args, kwargs, out)
        if kernel is not None and not self._is_silent(out):
            self.work.kernels.append(kernel)
        for tensor in tensors_of(out):
            self._know(tensor, tensor.untyped_storage().nbytes())
        self.work.rise_bytes = max(self.work.rise_bytes, self._alive_bytes() - self._base)
        return out

    def _is_silent(self, out: Any) -> bool:
        return isinstance(out, Tensor) and out.untyped_storage()._cdata in self._silent

    def _know(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), nbytes))  # type: ignore[no-untyped-call]

    def _alive_bytes(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._alive.values())


# -- a run of layers


class _Saved:
    """The storages that autograd saves, parameters and buffers apart, and which of them are read again."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        owned = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        self._constants = {tensor.untyped_storage()._cdata for tensor in owned}
        self.storages: dict[int, UntypedStorage] = {}
        self.reads: set[int] = set()

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._constants:
            self.storages[storage._cdata] = storage
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        self.reads.add(tensor.untyped_storage()._cdata)
        return tensor

    def nbytes(self, among: set[int] | None = None) -> int:
        return sum(storage.nbytes() for key, storage in self.storages.items() if among is None or key in among)


class _Cheap:
    """Notes the cheap pieces of a forward: their kernels, and what they would drop."""

    def __init__(self, counter: _Counter, saved: _Saved) -> None:
        self._counter, self._saved = counter, saved
        self.work = Work()
        self.pieces: list[set[int]] = []
        self.results: set[int] = set()
        self._alive: list[Tensor] = []

    def cheap(self, function: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Tensor:
        """Be told of one: a selective.Keeper."""
        self._alive += [one for one in inputs if isinstance(one, Tensor)]
        for one in inputs:
            if isinstance(one, Tensor):
                self._saved.pack(one)
        before, kernels, draws = set(self._saved.storages), len(self._counter.work.kernels), self._counter.draws
        with told_to(None):
            out = function(*inputs)
        if not isinstance(out, Tensor) or self._counter.draws > draws:
            return out
        self.work.kernels += self._counter.work.kernels[kernels:]
        result = out.untyped_storage()._cdata
        self.pieces.append(set(self._saved.storages) - before | ({result} - before))
        self.results.add(result)
        self._alive.append(out)
        return out

    def dropped(self) -> set[int]:
        """The storages that are saved without selective recompute only."""
        return set().union(*self.pieces) & set(self._saved.storages)

    def sizes(self, captured: int) -> SelectiveBytes | None:
        """Return what stays, `captured` being the gradients that wait for W; None where nothing is dropped."""
        saved, dropped = self._saved, self.dropped()
        if not dropped:
            return None
        return SelectiveBytes(
            saved=saved.nbytes() - saved.nbytes(dropped),
            captured=captured + saved.nbytes(dropped & self.results & saved.reads),
            transient=max(saved.nbytes(piece & dropped) for piece in self.pieces),
        )


def count(
    layers: Sequence[nn.Module], x: Tensor, target: Tensor | None, *, accumulation: Accumulation = "torch"
) -> Counted:
    """Run `layers` in a row forwards and backwards, once with the backward split and once fused, and count.

    All tensors are on the meta device. `x` is the input: tokens (int64) for the first layer of a model, else hidden
    states, or what carries the tensors that enter. `target` is given to the last layer where it is the model's, or one
    that asks for it. `accumulation` says who adds up the gradients
    of microbatches: torch with an operation of its own, or, `fused`, the matrix product that computes them.
    """
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad.untyped_storage() for layer in layers for p in layer.parameters() if p.grad is not None]
    with _Counter(gradients if accumulation == "fused" else ()) as counter:
        work = {op: Work() for op in OPS}
        sizes = _split(counter, work, layers, x, target)
        _fused(counter, work["backward"], layers, x, target)
        work["selective"], sizes.selective = _selective(counter, layers, x, target)
    incoming = x.nbytes if x.is_floating_point() else 0
    sizes.transient = {
        "forward": max(0, work["forward"].rise_bytes - sizes.saved - sizes.output),
        "backward_input": max(0, work["backward_input"].rise_bytes - incoming - sizes.captured),
        "backward_weight": work["backward_weight"].rise_bytes,
        "backward": max(0, work["backward"].rise_bytes - incoming),
    }
    return Counted(work, sizes)


def count_between(
    layers: Sequence[nn.Module],
    borders: Sequence[Bundle],
    target: Tensor | None = None,
    accumulation: Accumulation = "torch",
) -> Counted:
    """Count layers in a row that pass on what these borders say, one more than layers, within one stage."""
    last = len(layers) - 1
    stage = [
        bundled(layer, borders[index], borders[index + 1], packs=index == last) for index, layer in enumerate(layers)
    ]
    shape, dtype = borders[0].boundary
    return count(stage, torch.empty(shape, dtype=dtype, device="meta"), target, accumulation=accumulation)


def _forward(
    layers: Sequence[nn.Module], x: Tensor, target: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the input as a leaf where it has a gradient, else what the first of several layers passes on; and the
    output."""
    leaf = x.detach().requires_grad_() if x.is_floating_point() else None
    entry: Tensor | None = None
    flow: Flow = x if leaf is None else leaf
    for index, layer in enumerate(layers):
        behind, named = targets_for(layer, target, is_last=target is not None and layer is layers[-1])
        flow = layer(flow, *behind, **named)
        if leaf is None and index == 0 and len(layers) > 1:
            entry, flow = through_one(flow)
    assert isinstance(flow, Tensor)  # as `bundled` packs it
    return leaf, entry, flow


def _split(
    counter: _Counter,
    work: dict[str, Work],
    layers: Sequence[nn.Module],
    x: Tensor,
    target: Tensor | None,
    saved: _Saved | None = None,
    cheap: _Cheap | None = None,
) -> LayerBytes:
    saved = saved or _Saved(layers)
    counter.begin(work["forward"])
    with saved_tensors_hooks(saved.pack, saved.unpack), told_to(None if cheap is None else cheap.cheap):
        leaf, entry, output = _forward(layers, x, target)
    total, edge, output_bytes = saved.nbytes(), get_gradient_edge(output), output.nbytes if output.dim() else 0
    start = leaf if entry is None else entry
    begins = None if start is None else get_gradient_edge(start)
    counter.begin(Work())
    gradient = torch.empty_like(output)
    del output, start, entry
    counter.begin(work["backward_input"])
    below: list[Tensor] = []
    rest = split.SecondHalf()
    if begins is None:  # the first layer alone: its weight gradients start at its output
        begins, below = edge, [gradient]
    else:
        found, rest = split.backward_input(edge, gradient, begins)
        below = [found] if leaf is None and found is not None else []  # those of the first layer start at its output
        del found
    captured = _captured([*rest.tensors(), *below], saved)
    del gradient
    saved.reads.clear()
    counter.begin(work["backward_weight"])
    split.backward_weight(rest)
    while below:
        split.backward_whole(begins, below.pop())
    return LayerBytes(
        saved=total,
        residue=saved.nbytes(saved.reads) + captured,
        captured=captured,
        checkpoint=x.nbytes,
        output=output_bytes,
        static=0,
    )


def _selective(
    counter: _Counter, layers: Sequence[nn.Module], x: Tensor, target: Tensor | None
) -> tuple[Work, SelectiveBytes | None]:
    """Return what selective recompute of all layers adds to a backward, and the bytes that it leaves."""
    for layer in layers:
        find_cheap(layer)
    saved = _Saved(layers)
    cheap = _Cheap(counter, saved)
    sizes = _split(counter, defaultdict(Work), layers, x, target, saved, cheap)
    return cheap.work, cheap.sizes(sizes.captured)


def _captured(waiting: Iterable[Tensor], saved: _Saved) -> int:
    """Bytes of the gradients that wait for the second half, beside what was saved."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in waiting}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in saved.storages)


def _fused(counter: _Counter, work: Work, layers: Sequence[nn.Module], x: Tensor, target: Tensor | None) -> None:
    counter.begin(Work())
    leaf, _, output = _forward(layers, x, target)
    gradient = torch.empty_like(output)
    counter.begin(work)
    wanted = [parameter for layer in layers for parameter in layer.parameters()]
    torch.autograd.backward([output], [gradient], inputs=wanted if leaf is None else [*wanted, leaf])
