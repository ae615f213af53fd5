"""One stage's model work on its saved-tensor stores: forward, the backwards, recompute, offload and reload.

Independent of torch.distributed: the profiler measures on the very path that the replay runs. Stages take one tensor
and return one tensor, within them layers may pass tuples on; the model's last layer is called `layer(x, target)` and
returns the scalar mean loss. Any layer whose `forward` asks for the target by name (`*, target`) is given it.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from optpipe_compiler.errors import BadInput, RunFailed
from runtime_torch import engine, random_state, split
from runtime_torch.bundles import CHANGES_INPUT, bundle_of, unchanged
from runtime_torch.carrier import DirectCarrier
from runtime_torch.meter import Meter, rounded_up
from runtime_torch.microbatch import added_losses, inner_layer, keywords_for, takes, with_losses
from runtime_torch.regions import SelectiveStore
from runtime_torch.replicas import is_looked_after
from runtime_torch.selective import find_cheap, leave
from runtime_torch.slices import StageCarry
from runtime_torch.store import SavedTensorStore
from runtime_torch.surroundings import (
    attributes_now,
    autocast_as,
    autocast_now,
    buffers_now,
    buffers_of,
    put_attributes,
    put_buffers,
    same_attributes,
    sets_attributes,
    without_autocast,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from torch import UntypedStorage, nn

    from runtime_torch.bundles import Flow
    from runtime_torch.microbatch import Slice
    from runtime_torch.streams import Carrier
    from runtime_torch.surroundings import AttributeState, Autocast, BufferState

Constants = dict[tuple["nn.Module", str], tuple[Tensor, int]]
"""Buffers by module and name, and how often each was changed."""
Layers = tuple[int, int]
"""Layers `[first, end)`, numbered over the whole model."""


@dataclass(slots=True)
class _Checkpoint:
    """The input of a range that is recomputed, and what else its first forward depended on."""

    x: Flow
    """Detached; which of it needs a gradient is said beside it."""
    needs_gradient: list[bool]
    random: random_state.State
    autocast: Autocast
    buffers: list[BufferState]
    """Those that the forward changes, as it found them."""
    attributes: list[AttributeState]
    """As the forward found them."""
    changes: list[int]
    """How often each tensor of `x` had been changed in place."""
    constants: Constants
    """The other buffers."""

    def storages(self) -> list[UntypedStorage]:
        """Of all tensors."""
        return [one.untyped_storage() for one in (*tensors_in(self.x), *(state.value for state in self.buffers))]

    def check(self, first: int, number_of: Callable[[nn.Module], int]) -> None:
        """Raise RunFailed where what layer `first` begins with, or one has in attributes, is no longer what it was."""
        if self.changes != [engine.changes(one) for one in tensors_in(self.x)]:
            raise RunFailed(
                f"layer {first}: its input was changed in place, and the schedule computes the layer once more from "
                "it, expected a new tensor"
            )
        restored = {id(state.tensor) for state in self.buffers}
        for module, name in (lost for state in self.attributes for lost in state.lost(restored)):
            raise RunFailed(
                f"layer {number_of(module)}: the tensor in its attribute {name} was changed in place since the "
                "forward, and the schedule computes the layer once more, expected a new tensor, or one that was "
                "there before the first step and that each forward changes"
            )

    def check_constants(self, now: Constants, number_of: Callable[[nn.Module], int]) -> None:
        """Raise RunFailed where buffers changed since that no forward seemed to change.

        A table that was made since, or is larger now, is a forward's own: it makes the same once more.
        """
        for (module, name), (buffer, changes) in now.items():
            earlier, as_often = self.constants.get((module, name), (buffer, changes))
            if earlier.shape == buffer.shape and (earlier is not buffer or changes != as_often):
                raise RunFailed(
                    f"layer {number_of(module)}: its buffer {name} has changed since the forward, which it had not in "
                    "the trial before the first step, and the schedule computes the layer once more from what is there "
                    "now: expected a buffer that each forward changes or none does, or a schedule without recomputes "
                    "of this layer"
                )


@dataclass(slots=True)
class _Pass:
    """One unit on its way through the stage. No activation is held here except by store and checkpoints."""

    store: SavedTensorStore
    part: Slice | None = None
    target: Tensor | None = None
    """As it was given; what layers get is saved and moved like an activation."""
    leaf: Tensor | None = None
    """The input, where it has a gradient; its data is a stub once the forward is over."""
    entry: GradientEdge | None = None
    """First stage: the first output with a gradient (the embedding's); the halves of a split backward meet there."""
    entry_layer: int | None = None
    """The layer whose output that is."""
    output: GradientEdge | None = None
    checkpoints: dict[Layers, _Checkpoint] = field(default_factory=dict)
    rest: split.SecondHalf | None = None
    entry_gradient: Tensor | None = None
    captured: list[UntypedStorage] = field(default_factory=list)
    changes: list[int] = field(default_factory=list)
    """How often each of the gradients that wait for W had been changed in place when I was over."""

    def waiting(self) -> list[Tensor]:
        """The gradients that wait for W."""
        tensors = list(self.rest.tensors()) if self.rest is not None else []
        return tensors if self.entry_gradient is None else [*tensors, self.entry_gradient]


class StageExecution:
    """The layers `[first_layer, first_layer + len(layers))` of a model, run one op at a time.

    Each op is one call. Bytes held between the calls are counted in `meter` (saved tensors, checkpoints, captured
    gradients, keys and values of slices); inputs, outputs and gradients belong to the caller. `microbatch` is the
    number of any unit: a slice says in its forward what it is a part of. `offload` and `reload` may be called from
    another thread than the rest, as long as the ops of one unit follow the order of the schedule file.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first_layer: int,
        *,
        is_first: bool,
        is_last: bool,
        device: torch.device | str,
        meter: Meter | None = None,
        host_meter: Meter | None = None,
        selective: Collection[int] = (),
        block_bytes: int = 1,
    ) -> None:
        """`block_bytes`: of what the allocator gives out multiples, where what it gives out is asked for."""
        self.layers = list(layers)
        for index, layer in enumerate(self.layers, first_layer):
            _refuse_without_memory(index, layer)
        self.selective = frozenset(selective)
        """The layers, by number, whose cheap tensors are made again in their backward."""
        for index in self.selective:
            find_cheap(self.layers[index - first_layer])
        self.first_layer = first_layer
        self.is_first = is_first
        self.is_last = is_last
        self.device = torch.empty(0, device=device).device
        self.meter = meter or Meter()
        self.host_meter = host_meter or Meter()
        self._block_bytes = block_bytes
        self._by_name = [takes(layer, "target") for layer in self.layers]
        """Of each layer: whether it asks for the target by name."""
        self._carries = [takes(layer, "carry") for layer in self.layers]
        """Of each layer: whether it asks for the carry."""
        self._constants: frozenset[int] = frozenset()
        """The addresses of what the stage owns, without the buffers that a forward changes."""
        self._changing: dict[int, list[nn.Module]] = {}
        """By layer: the modules of which a forward changes buffers, such as running statistics."""
        self._changed: dict[int, Tensor] = {}
        """These buffers by address: one that a forward replaces is kept, lest an activation have its address."""
        self._everywhere = random_state.everywhere(self.device)
        self._owned: dict[int, list[random_state.Source]] = {}
        """By layer that was asked for in this step: the generators that it has itself."""
        self._plain: dict[int, list[nn.Module]] = {}
        """By layer that was asked for in this step: the modules whose attributes are restored."""
        self._buffered: dict[int, list[nn.Module]] = {}
        """By layer that was asked for in this step: the modules whose buffers no forward changes."""
        self._passes: dict[int, _Pass] = {}
        self._carried: dict[int, StageCarry] = {}
        """By microbatch that is cut into slices."""
        self._stub: Tensor | None = None
        """A tensor of the input's shape without its memory."""
        self._one: Tensor | None = None
        """The gradient of the loss by itself, on the last stage."""
        self._watched: dict[nn.Parameter, Tensor | None] = {}
        """The trained parameters whose gradient may begin anew, and the last seen: those that have had none since the
        step began, and those of which a hook may set it to None."""
        self.begin()
        self.carrier: Carrier = DirectCarrier(self.device, self.meter, self.host_meter)
        """Does the copies of offloads and reloads; a replay on CUDA puts its own here."""

    @property
    def end_layer(self) -> int:
        """One past the stage's last layer."""
        return self.first_layer + len(self.layers)

    def begin(self) -> None:
        """A step begins: parameters may have moved since the last one, or others have taken their place."""
        changing = [buffer for modules in self._changing.values() for one in modules for _, buffer in buffers_of(one)]
        self._changed = {tensor.untyped_storage().data_ptr(): tensor for tensor in changing}
        self._owned, self._buffered, self._plain = {}, {}, {}
        owned = [tensor for layer in self.layers for tensor in (*layer.parameters(), *layer.buffers())]
        self._constants = frozenset(tensor.untyped_storage().data_ptr() for tensor in owned) - self._changed.keys()
        trained = (one for layer in self.layers for one in layer.parameters() if one.requires_grad)
        self._watched = {one: one.grad for one in trained if one.grad is None or engine.has_hooks(one)}

    def forget(self) -> None:
        """A step was left in the middle, and none goes on with it: let go what it held."""
        while self._passes:
            self._release(self._passes.popitem()[1])
        while self._carried:
            self._carried.popitem()[1].clear()

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Within: forwards on trial, which tell which buffers a forward changes, and which tensors in attributes. These
        are afterwards as before, and so are random states and what layers remember of their calls, but for those with
        parts in FSDP2 or DDP, which remember their own."""
        before = {index: buffers_now(layer.modules()) for index, layer in enumerate(self.layers, self.first_layer)}
        inner_layers = {index: inner_layer(layer) for index, layer in enumerate(self.layers, self.first_layer)}
        plain = {index: layer for index, layer in inner_layers.items() if not is_looked_after(layer)}
        attributes = {index: [(one, dict(vars(one))) for one in layer.modules()] for index, layer in plain.items()}
        frozen = [
            (index, name, one, _mark(one))
            for index, layer in plain.items()
            for inner in layer.modules()
            for name, one in inner.named_parameters(recurse=False)
            if not one.requires_grad and getattr(inner, "max_norm", None) is None
        ]
        limited = [
            (one, one.detach().clone())
            for layer in plain.values()
            for inner in layer.modules()
            if getattr(inner, "max_norm", None) is not None  # a forward changes what it looks up
            for one in inner.parameters(recurse=False)
        ]
        gradients = [(one, one.grad) for layer in plain.values() for one in layer.parameters()]
        for one, _ in gradients:
            one.grad = None
        with ExitStack() as stack:
            stack.enter_context(random_state.untouched(self._random_in((self.first_layer, self.end_layer))))
            for layer in plain.values():
                stack.enter_context(unchanged(layer))
            try:
                yield
            finally:
                for one, gradient in gradients:
                    one.grad = gradient
                for one, value in limited:
                    one.data.copy_(value)
                setting = {
                    module for had_in in attributes.values() for module, had in had_in if sets_attributes(module, had)
                }
                self._changing = {}
                for index, states in before.items():
                    changed = [state for state in states if state.has_changed()]
                    if changed:
                        self._changing[index] = list(dict.fromkeys(state.module for state in changed))
                    put_buffers(changed)
                self.begin()
        for index in self.selective:
            leave(self.layers[index - self.first_layer], setting.union(self._changing.get(index, ())))
        for index, name, one, before_it in frozen:
            if _mark(one) != before_it:
                raise BadInput(
                    f"layer {index} changes its frozen parameter {name} in its forward, expected a buffer, which is "
                    "put back where a forward is repeated"
                )

    def marks(self) -> dict[tuple[int, str], str]:
        """Return what tells whether a forward has changed trained parameters, by layer and name."""
        return {
            (index, name): _mark(one)[1]
            for index, layer in enumerate(map(inner_layer, self.layers), self.first_layer)
            if not is_looked_after(layer)
            for name, one in layer.named_parameters()
            if one.requires_grad
        }

    # -- ops

    def forward(
        self,
        microbatch: int,
        x: Tensor,
        target: Tensor | None = None,
        recomputed: Sequence[Layers] = (),
        part: Slice | None = None,
    ) -> Tensor:
        """F: return the output (detached; on the last stage the scalar loss, of a slice its part of the microbatch's).

        `recomputed` ranges keep only their input; `recompute` must be called for each before a backward. Of `part`s of
        a microbatch forwards ascend and backwards descend.
        """
        stays: Collection[int] = ()
        if part is not None:
            if part.index == 0:
                self._carried[part.microbatch] = StageCarry(part.starts, self.meter)
            stays = self._carried[part.microbatch].addresses
        kind = SelectiveStore if self.selective else SavedTensorStore
        run = _Pass(kind(self.device, self.meter, self.carrier, self._constants, stays, self._changed), part)
        self._passes[microbatch] = run
        return self._forward(run, x, target, recomputed)

    def backward(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """B: accumulate the weights' gradients, return the input's (None on the first stage)."""
        run = self._passes.pop(microbatch)
        try:
            if run.output is None:
                return None
            root = self._root(run, gradient)
            run.store.let_go()
            with without_autocast(self.device), self._in_own_graph(run):
                engine.accumulate([run.output], [root])
            found = None if run.leaf is None else run.leaf.grad
            self._separate(one.untyped_storage() for one in (root, found) if one is not None)
            return found
        finally:
            self._release(run)
            self._drop_carry(run)

    def backward_input(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """I: return the input's gradient (None on the first stage); keep only what the weight gradients read."""
        run = self._passes[microbatch]
        with without_autocast(self.device), self._in_own_graph(run):
            found = self._backward_input(run, gradient)
        self._drop_carry(run)
        return found

    def backward_weight(self, microbatch: int) -> None:
        """W: accumulate the weights' gradients."""
        run = self._passes.pop(microbatch)
        try:
            with without_autocast(self.device), self._in_own_graph(run):
                self._backward_weight(run)
        finally:
            self._release(run)

    def recompute(self, microbatch: int, layers: Layers) -> None:
        """R: run the forward of `layers` once more and put what it saves back into the original graph's slots."""
        run = self._passes[microbatch]
        checkpoint = run.checkpoints.pop(layers)
        checkpoint.check(layers[0], self._number_of)
        checkpoint.check_constants(self._constants_in(layers), self._number_of)
        needs = iter(checkpoint.needs_gradient)
        x = _each(checkpoint.x, lambda part: part.detach().requires_grad_(next(needs)))
        now = buffers_now(self._changing_in(layers))
        with (
            same_attributes(self._plain_in(layers)),
            random_state.restored(checkpoint.random),
            torch.enable_grad(),
            autocast_as(checkpoint.autocast, self.device),
            run.store.refilling(*layers),
            added_losses(),  # those of the forward hang on its graph
        ):
            put_buffers(checkpoint.buffers)
            put_attributes(checkpoint.attributes)
            if run.store.autocast:
                x = _each(x, lambda part: part.view_as(part))
            for index in range(*layers):
                x = self._call(run, index, x)
                if index == run.entry_layer and index + 1 < layers[1]:
                    _, x = through_one(x)
            put_buffers(now)
        for storage in checkpoint.storages():
            self.meter.release(storage)

    def offload(self, microbatch: int, layers: Layers) -> None:
        """D2H: copy what `layers` saved to the host, each storage once, then free it on the device."""
        self._passes[microbatch].store.offload(*layers)

    def reload(self, microbatch: int, layers: Layers) -> None:
        """H2D: bring what `layers` offloaded back to the device, then free it on the host."""
        self._passes[microbatch].store.reload(*layers)

    def reload_sizes(self, microbatch: int, layers: Layers) -> list[int]:
        """The bytes of each storage that a reload would bring back now."""
        return self._passes[microbatch].store.host_sizes(*layers)

    def passed_back(self, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient of the input, on the first stage that of its first output that has one, for comparing:
        nothing is added to that of any parameter, and no other backward follows."""
        run = self._passes[microbatch]
        start = run.entry if run.leaf is None else get_gradient_edge(run.leaf)
        found: Tensor | None = None
        if run.output is not None and start is not None:
            root = self._root(run, gradient)
            with without_autocast(self.device), self._in_own_graph(run):
                (found,) = engine.capture([run.output], [root], [start], retain=False)
        self._drop_carry(run)
        return found

    def make_again(self, microbatch: int) -> None:
        """Make all cheap tensors again, as a backward does when it reads them: for measuring."""
        store = self._passes[microbatch].store
        assert isinstance(store, SelectiveStore)
        store.make_again()

    # -- asking

    def saved_bytes(self, microbatch: int, layers: Layers | None = None) -> int:
        """Bytes on the device that `layers` (absent: all of the stage) saved for `microbatch`, each storage once."""
        return self.occupied(self._passes[microbatch].store.live_sizes(layers))

    def passes_back(self, microbatch: int) -> bool:
        """Between a forward and its backward: whether the input will get a gradient, or needs none (first stage)."""
        run = self._passes[microbatch]
        if run.leaf is None:
            return True
        return run.output is not None and split.leads_to(run.output, get_gradient_edge(run.leaf))

    def captured_bytes(self, microbatch: int) -> int:
        """Between I and W: bytes of the captured gradients, beside the saved bytes that are left."""
        run = self._passes[microbatch]
        saved = {storage.data_ptr() for storage in run.store.storages()}
        return self.occupied({s.data_ptr(): s.nbytes() for s in run.captured if s.data_ptr() not in saved}.values())

    def result_bytes(self, microbatch: int) -> int:
        """Between I and W: the part of the saved bytes that selective recompute has made again."""
        return self.occupied(self._passes[microbatch].store.result_sizes())

    def carry_bytes(self, microbatch: int) -> int:
        """Bytes of the keys and values of a slice that are kept for later ones: part of `saved_bytes`."""
        part = self._passes[microbatch].part
        return 0 if part is None else self.occupied(self._carried[part.microbatch].sizes(part.index))

    def checkpoint_bytes(self, microbatch: int) -> int:
        """Bytes of the inputs that are kept for recomputes still to come."""
        kept = [storage for one in self._passes[microbatch].checkpoints.values() for storage in one.storages()]
        return self.occupied({s.data_ptr(): s.nbytes() for s in kept}.values())

    def occupied(self, sizes: Iterable[int]) -> int:
        """Bytes that the allocator gives out for storages of these sizes."""
        return sum(rounded_up(nbytes, self._block_bytes) for nbytes in sizes)

    # -- how

    def _forward(self, run: _Pass, x: Tensor, target: Tensor | None, recomputed: Sequence[Layers]) -> Tensor:
        x = _compact(x)
        run.target = target
        run.store.autocast = torch.is_autocast_enabled(self.device.type) and torch.is_autocast_cache_enabled()
        if not self.is_first:
            if not (x.is_floating_point() or x.is_complex()):
                raise BadInput(
                    f"layer {self.first_layer - 1} returns {str(x.dtype).removeprefix('torch.')} alone, and a stage "
                    "ends with it, expected floats, through which gradients pass back: let it be one layer with the "
                    "next"
                )
            run.leaf = x.detach()
            if type(x) is not torch.Tensor:  # torch finds no way back to a leaf of another class
                run.leaf = run.leaf.as_subclass(torch.Tensor)
            run.leaf.requires_grad_()
            # layers get a view: the leaf loses its data at the end, what a hook or function kept of its input does not;
            # and autocast keeps its copies of leaves, but of no views, to the end of the step
            x = run.leaf.view_as(run.leaf)
        ends = {end: (first, end) for first, end in recomputed}
        starts = {first: (first, end) for first, end in recomputed}
        flow: Flow = x
        del x
        with run.store.saving(), added_losses() as added:
            for index in range(self.first_layer, self.end_layer):
                if index in starts:
                    flow = self._keep_input(run, starts[index], flow)
                run.store.layer = index
                flow = self._call(run, index, flow)
                if index + 1 in ends:
                    kept = tensors_in(run.checkpoints[ends[index + 1]].x)
                    run.store.drop(*ends[index + 1], kept, tensors_in(flow))
                if self.is_first and run.entry is None:
                    flow = self._enter(run, index, flow)
                if ends:
                    run.store.pass_on(tensors_in(flow))
        assert isinstance(flow, Tensor)
        if self.is_last and run.part is not None and not self._carries[-1]:
            flow = flow * run.part.share  # of the mean over the slice's tokens
        return self._hand_over(run, with_losses(flow, added))

    def _enter(self, run: _Pass, index: int, x: Flow) -> Flow:
        """Where the first stage's first output with a gradient is, let all of it pass one node."""
        if not any(part.requires_grad for part in tensors_in(x)):
            return x
        if run.part is not None and self._carried[run.part.microbatch].has_kept(run.part.index, range(index + 1)):
            which = "is the model's first" if index == 0 else "no layer before it has a trained parameter"
            raise BadInput(
                f"layer {index} has weights below its attention and {which}: run in slices, it must be two layers, of "
                "which the first has no attention" + (f", or train layer {index - 1}" if index else "")
            )
        carrier, x = through_one(x)
        run.entry, run.entry_layer = get_gradient_edge(carrier), index
        return x

    def _hand_over(self, run: _Pass, x: Tensor) -> Tensor:
        """Keep the way back into the graph, not the data of the output or the input."""
        if x.requires_grad:
            run.output = get_gradient_edge(x)
            if self.is_last and (self._one is None or self._one.dtype != x.dtype):
                self._one = torch.ones_like(x)
        output = x.detach()
        if run.leaf is not None:
            if self._stub is None or self._stub.shape != run.leaf.shape or self._stub.dtype != run.leaf.dtype:
                self._stub = run.leaf.new_empty(()).expand(run.leaf.shape)
            run.leaf.data = self._stub
        return output

    def _call(self, run: _Pass, index: int, x: Flow) -> Flow:
        try:
            if index not in self.selective:
                return self._apply(index, x, run)
            assert isinstance(run.store, SelectiveStore)
            with run.store.selective(index):
                return self._apply(index, x, run)
        except RuntimeError as error:
            for said, sentence in _UNCOUNTED.items():
                if said in str(error):
                    raise BadInput(f"layer {index} {sentence}") from error
            if "used in an in-place operation" not in str(error) and "modified inplace" not in str(error):
                raise
            raise BadInput(f"layer {index} {CHANGES_INPUT}") from error

    def _apply(self, index: int, x: Flow, run: _Pass) -> Flow:
        layer = self.layers[index - self.first_layer]
        by_name = self._by_name[index - self.first_layer]
        named = keywords_for(layer)
        if run.part is not None and self._carries[index - self.first_layer]:
            part = run.part
            named["carry"] = self._carried[part.microbatch].of(part.index, index, part.target)
        if not by_name and not (self.is_last and index + 1 == self.end_layer):
            return layer(x, **named)  # type: ignore[no-any-return]
        given = None if run.target is None else _compact(run.target)
        if by_name:
            return layer(x, target=given, **named)  # type: ignore[no-any-return]
        return layer(x, given, **named)  # type: ignore[no-any-return]

    def discard(self, microbatch: int) -> None:
        """Forget a forward whose backward will not come; its keys and values stay for later slices."""
        self._release(self._passes.pop(microbatch))

    def _drop_carry(self, run: _Pass) -> None:
        """The slice's own backward is over, and with that of the first one all of the microbatch."""
        if run.part is None:
            return
        carried = self._carried[run.part.microbatch]
        carried.drop(run.part.index)
        if run.part.index == 0:
            del self._carried[run.part.microbatch]

    def _keep_input(self, run: _Pass, layers: Layers, x: Flow) -> Flow:
        """Keep the input of a range that is recomputed; return what the range gets.

        A part of a larger storage that an earlier layer saves may leave the device with it, so the range keeps a copy;
        where nobody saves it yet, the copy takes its place.
        """
        x = _each(x, lambda part: _compact(part) if run.store.holding_at(part.untyped_storage()) is None else part)
        kept = _each(x, lambda part: _compact(part.detach()))
        checkpoint = _Checkpoint(
            kept,
            [part.requires_grad for part in tensors_in(x)],
            random_state.now(self._random_in(layers)),
            autocast_now(self.device),
            buffers_now(self._changing_in(layers)),
            attributes_now(self._plain_in(layers)),
            [engine.changes(part) for part in tensors_in(kept)],
            self._constants_in(layers),
        )
        run.checkpoints[layers] = checkpoint
        for storage in checkpoint.storages():
            self.meter.hold(storage)
        return x

    def _plain_in(self, layers: Layers) -> list[nn.Module]:
        """Return the modules in layers [first, end), without those that DDP and FSDP2 keep numbers in."""
        for index in range(*layers):
            if index not in self._plain:
                layer = inner_layer(self.layers[index - self.first_layer])
                self._plain[index] = [] if is_looked_after(layer) else list(layer.modules())
        return [module for index in range(*layers) for module in self._plain[index]]

    def _random_in(self, layers: Layers) -> list[random_state.Source]:
        """Return the sources of random numbers that layers [first, end) may draw from."""
        found = list(self._everywhere)
        for index in range(*layers):
            if index not in self._owned:
                self._owned[index] = random_state.owned(self.layers[index - self.first_layer].modules())
            found += self._owned[index]
        return found

    def _constants_in(self, layers: Layers) -> Constants:
        """Return the buffers in layers [first, end) that no forward changes."""
        found: Constants = {}
        for index in range(*layers):
            if index not in self._buffered:
                changing = set(self._changing.get(index, ()))
                modules = self.layers[index - self.first_layer].modules()
                self._buffered[index] = [one for one in modules if one not in changing]
            for module in self._buffered[index]:
                for name, buffer in module.named_buffers(recurse=False):
                    found[module, name] = buffer, engine.changes(buffer)
        return found

    def _number_of(self, module: nn.Module) -> int:
        """Return the number of the layer that a module is in."""
        found = (module in layer.modules() for layer in self.layers)
        return self.first_layer + next(place for place, is_there in enumerate(found) if is_there)

    def _changing_in(self, layers: Layers) -> list[nn.Module]:
        """Return the modules in layers [first, end) of which a forward changes buffers."""
        return [module for index in range(*layers) for module in self._changing.get(index, ())]

    def _root(self, run: _Pass, gradient: Tensor | None) -> Tensor:
        """The gradient of the output; on the last stage, where none is given, of the loss by itself."""
        if run.checkpoints:
            raise RunFailed(f"a backward started before the recompute of layers {next(iter(run.checkpoints))}")
        root = self._one if self.is_last and gradient is None else gradient
        if root is None:
            raise RunFailed(f"stage of layers {self.first_layer} to {self.end_layer - 1}: no gradient of its output")
        return root

    def _backward_input(self, run: _Pass, gradient: Tensor | None) -> Tensor | None:
        if run.output is None:
            return None
        start = run.entry if run.leaf is None else get_gradient_edge(run.leaf)
        assert start is not None
        root = self._root(run, gradient)
        found, run.rest = split.backward_input(run.output, root, start, run.store.keep_results)
        read = list(run.rest.take_finished())  # while the graph is there: without it torch 2.11 does not say
        run.output = run.target = None
        if run.entry is not None:
            run.entry_gradient = found
        self._hold_captured(run)
        self._separate([*run.captured, *(one.untyped_storage() for one in (root, found) if one is not None)])
        run.store.finish(read)
        return None if self.is_first else found

    @contextmanager
    def _in_own_graph(self, run: _Pass) -> Iterator[None]:
        """Within: a backward. Raise BadInput where that of a slice has led into the graph of another one."""
        try:
            yield
        except RuntimeError as error:
            if run.part is None or "backward through the graph a second time" not in str(error):
                raise
            raise BadInput(
                f"layers {self.first_layer} to {self.end_layer - 1}: what a layer has kept of a slice leads the "
                "backward of the next one into the graph of that slice, expected that it looks at earlier slices by "
                "`carry.attend` alone: other states, as of recurrent layers, cannot be sliced"
            ) from error

    def _hold_captured(self, run: _Pass) -> None:
        """Count the gradients that wait for W."""
        tensors = run.waiting()
        run.captured = [tensor.untyped_storage() for tensor in tensors]
        run.changes = [engine.changes(tensor) for tensor in tensors]
        for storage in run.captured:
            self.meter.hold(storage)

    def _backward_weight(self, run: _Pass) -> None:
        if run.changes != [engine.changes(tensor) for tensor in run.waiting()]:
            raise RunFailed(
                f"layers {self.first_layer} to {self.end_layer - 1}: a gradient that waits for the second half of a "
                "split backward was changed in place meanwhile, as by a function that returns one tensor again and "
                "again: expected a new one from each backward, or a schedule compiled with --no-split"
            )
        if run.rest is not None:
            split.backward_weight(run.rest)
        if run.entry is not None and run.entry_gradient is not None:
            split.backward_whole(run.entry, run.entry_gradient)
        self._separate(run.captured)

    def _separate(self, passed: Iterable[UntypedStorage]) -> None:
        """Give parameters gradients of their own where torch took over a view of what was `passed` to others.

        It looks whether anyone else has the tensor, not the memory. What it took over once it adds to in place, and a
        gradient that waits for its message or for the stage before would change with it.
        """
        if not self._watched:
            return
        taken = {storage.data_ptr() for storage in passed}
        left = {}
        for parameter, before in self._watched.items():
            gradient: Tensor | None = parameter.grad
            if gradient is not before and type(gradient) is Tensor and gradient.layout is torch.strided:
                if gradient.untyped_storage().data_ptr() in taken:
                    gradient = parameter.grad = gradient.clone()
                taken.add(gradient.untyped_storage().data_ptr())
            if gradient is None or engine.has_hooks(parameter):
                left[parameter] = gradient
        self._watched = left

    def _release(self, run: _Pass) -> None:
        """Forget all that a pass still holds."""
        for checkpoint in run.checkpoints.values():
            for storage in checkpoint.storages():
                self.meter.release(storage)
        run.checkpoints.clear()
        for storage in run.captured:
            self.meter.release(storage)
        run.captured.clear()
        run.rest = None
        run.store.clear()


def _refuse_without_memory(index: int, layer: nn.Module) -> None:
    """Raise BadInput where a layer owns a tensor that has no memory to tell it from activations."""
    inner = inner_layer(layer)
    for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
        if tensor.layout is not torch.strided:
            raise BadInput(f"layer {index}: {name} is sparse, expected a dense parameter or buffer")
        try:
            tensor.untyped_storage().data_ptr()
        except RuntimeError as error:
            raise BadInput(
                f"layer {index}: {name} is a {type(tensor.data).__name__}, which has no memory of its own, expected an "
                "ordinary tensor: neither tensor parallelism nor weights quantized into such a class can be run"
            ) from error


def tensors_in(x: Flow) -> tuple[Tensor, ...]:
    """Return the tensors that pass from one layer to the next."""
    return x if isinstance(x, tuple) else (x,)


def through_one(x: Flow) -> tuple[Tensor, Flow]:
    """Return a tensor that carries `x`, and `x` as parts of it."""
    if isinstance(x, Tensor):
        return x, x
    bundle = bundle_of(x, "a layer")
    carrier = bundle.pack(x)
    return carrier, bundle.unpack(carrier)


def _each(x: Flow, change: Callable[[Tensor], Tensor]) -> Flow:
    return tuple(map(change, x)) if isinstance(x, tuple) else change(x)


_UNCOUNTED = {
    "Cannot access storage of Sparse": "saves a sparse tensor for its backward, whose bytes are not counted, expected "
    "dense ones",
    "invalid python storage": "saves a tensor for its backward that has no memory of its own, as in torch.func or a "
    "nested tensor, whose bytes are not counted, expected ordinary ones",
    "support saved tensor hooks": "takes gradients by torch.func in its forward, where torch tells nobody what is "
    "saved, expected torch.autograd.grad with create_graph=True",
}
"""By what torch says of a layer's forward: the same in our own words."""

_PIECE = 1 << 22
"""Numbers of a parameter that are added up at once."""


def _mark(parameter: Tensor) -> tuple[int, str]:
    """Return what tells whether a parameter was changed, by way of its `data`, too.

    It is added up piece by piece: a sum in double precision may copy what it adds up.
    """
    value = parameter.detach()
    value = value if value.dim() else value[None]
    rows = max(1, _PIECE * len(value) // max(1, value.numel()))
    try:
        dtype = torch.complex128 if value.is_complex() else torch.float64
        total = repr(sum(piece.sum(dtype=dtype).item() for piece in torch.split(value, rows)))
    except (RuntimeError, NotImplementedError):  # of a dtype that cannot be added up, such as a float8
        total = ""
    return engine.changes(parameter), total


def _compact(tensor: Tensor) -> Tensor:
    """Return `tensor` itself, or a copy where it is a view of a larger storage (a microbatch cut from a batch)."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
