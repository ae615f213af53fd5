"""transformers' decoder-only models as lists of layers, and back to a folder that `from_pretrained` reads.

Nothing of any architecture is restated. A layer of ours is the model itself with all other parts taken out: its
forward makes masks and positions as ever, runs the one part that is there on what came from the layer before, and
skips the rest. So every model works whose forward only runs its decoder layers one after another, which `layers_of`
tries before it answers; and a layer's state dict has the names that the model's has.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optpipe_compiler.errors import BadInput, first_line
from optpipe_torch.frameworks.common import keeping_dtypes, loaded
from runtime_torch.runner import Runner
from runtime_torch.stages import build_stages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from optpipe_compiler.documents import ir
    from runtime_torch.stages import Stages

MODEL_NAME = "whole"
"""The name under which a layer has its model, in state dicts between the layer's number and the model's own name."""
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, NameError)
"""What a model's forward may raise that is not what we take it for."""
PASSED_ON = ("attention_mask", "position_ids")
"""What a model's forward may be given beside tokens."""


def layers_of(model: Any, inputs: Sequence[str] = ("input_ids",), *, shifted: bool = False) -> list[nn.Module]:
    """Return a causal language model of transformers as layers: embedding, one for each decoder layer, head.

    The layers share the model's modules. `inputs` names what a step is given, in this order: `input_ids` (batch,
    sequence), then any of `attention_mask` and `position_ids` of the same shape, which are passed along. The target
    are transformers' labels, which the model's own loss shifts by one and of which it ignores -100; `shifted`: each is
    the token behind its input already. Dropout, sliding windows and the like are as in the model; caches are off.

    Raises BadInput for a model whose forward does more than running its layers in a row.
    """
    _check(model, inputs)
    anatomy = _Anatomy.of(model)
    names = tuple(inputs[1:])
    kinds = getattr(model.config, "layer_types", None) or [""] * anatomy.depth
    layers: list[nn.Module] = [
        Embedding(anatomy.thinned(), names, "embedding"),
        *(
            DecoderLayer(anatomy.thinned(index), names, f"decoder layer {kinds[index]}")
            for index in range(anatomy.depth)
        ),
        Head(anatomy.thinned(anatomy.depth), names, "head", shifted=shifted),
    ]
    _try(model, layers, inputs)
    return layers


def pipelined(
    model: Any,
    schedule: ir.Schedule | Path | str,
    batch: Tensor | Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    **options: Any,
) -> tuple[Runner, Stages]:
    """Return the runner and the stages of this rank for a model of transformers; joins the group of torchrun first.

    `batch` is an example of what a step gets, all microbatches of it: tokens, or a mapping as tokenizers give it, whose
    `labels` are left to `step`. `device`: absent, the rank's own GPU where each rank of this machine has one, else the
    CPU. `options` are those of `build_stages`.
    """
    device = _joined() if device is None else torch.device(device)
    plan = loaded(schedule)
    tensors = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
    tensors.pop("labels", None)
    example = [tensor.tensor_split(plan.setup.microbatches)[0] for tensor in tensors.values()]
    layers = layers_of(model, list(tensors))
    stages = build_stages(plan, layers, dist.get_rank(group), device, inputs=example, target=example[0], **options)
    return Runner(plan, stages, group=group), stages


def own_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of `Stages.module` under the names of the model: "3.whole.model.norm.weight" loses two."""
    return {name.split(f"{MODEL_NAME}.", 1)[1]: tensor for name, tensor in state.items()}


def state_dict(stages: Stages, group: dist.ProcessGroup | None = None) -> dict[str, Tensor]:
    """Return the whole model's state dict, on the CPU, on the first rank of `group`; elsewhere an empty one.

    All ranks of the pipeline's `group` call it, and under FSDP2 those of all its replicas.
    """
    mine = {name: _whole(tensor) for name, tensor in own_names(stages.module.state_dict()).items()}
    first = dist.get_rank(group) == 0
    parts: list[dict[str, Tensor]] | None = [{}] * dist.get_world_size(group) if first else None
    dist.gather_object(mine, parts, group=group, group_dst=0)
    return {name: tensor for part in parts or () for name, tensor in part.items()}


def save_pretrained(model: Any, stages: Stages, folder: Path | str, group: dist.ProcessGroup | None = None) -> None:
    """Write what the ranks have trained as `model.save_pretrained` does; all ranks call it, the first one writes.

    `model` is the one that `layers_of` was given; where ranks trained layers of their own, its other weights are old.
    """
    found = state_dict(stages, group)
    if found:
        model.save_pretrained(folder, state_dict=found)
    dist.barrier(group)


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _joined() -> torch.device:
    """Join the processes that torchrun started, where that has not been done; return this one's device."""
    ranks, local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.device_count() >= ranks else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


# -- layers


class _Border:
    """What enters the one part of a thinned model that is there."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.is_taken = False

    @contextmanager
    def at(self, value: Tensor) -> Iterator[Tensor]:
        """Within: that is what enters. Zeros stand for it before; the result is of them where nothing has taken it."""
        self.value, self.is_taken = value, False
        try:
            yield self.zeros()
        finally:
            self.value = None
        if not self.is_taken:
            raise RuntimeError("the model's forward did not call the part that this layer has")

    def take(self) -> Tensor | None:
        """Return it, for the part that it enters."""
        self.is_taken = True
        return self.value

    def zeros(self) -> Tensor:
        """Return zeros of the shape of what enters, without memory of their own."""
        assert self.value is not None
        return self.value.new_zeros(()).expand(self.value.shape)

    def enter(self, _module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Replace what the model would give the part, which is a pre-hook's; outside of our layers change nothing."""
        if self.value is None:
            return None
        if "hidden_states" in named:
            return args, {**named, "hidden_states": self.take()}
        return (self.take(), *args[1:]), named


class _Absent(nn.Module):
    """In place of a part before the decoder layers: zeros of the shape of what really enters."""

    def __init__(self, border: _Border) -> None:
        super().__init__()
        self.border = border

    def forward(self, *_args: Any, **_named: Any) -> Tensor:
        """Return them."""
        return self.border.zeros()


class _Skipped(nn.Module):
    """In place of a decoder layer, or of a part behind them: what enters leaves; where there is a border, what really
    enters there."""

    def __init__(self, border: _Border | None = None, *, as_tuple: bool = False) -> None:
        super().__init__()
        self.border = border
        self.as_tuple = as_tuple

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return it as the layer does."""
        x = args[0] if args else named["hidden_states"]
        x = x if self.border is None else self.border.take()
        return (x,) if self.as_tuple else x


@dataclass(frozen=True, slots=True)
class _Thinned:
    """A model of which one part is left."""

    whole: Any
    path: str
    """Of the module that has the decoder layers."""
    part: nn.ModuleList
    """What is left, to tell kinds of layers apart."""
    context: nn.ModuleList
    """What makes positions and the like; without parameters, shared by all layers."""
    border: _Border


class _Layer(nn.Module):
    """A part of the model, called with what leaves the part before it and with what is passed along."""

    def __init__(self, thinned: _Thinned, names: tuple[str, ...], title: str) -> None:
        super().__init__()
        self.whole = thinned.whole
        self._thinned = thinned
        self._names = names
        self._title = title

    def __repr__(self) -> str:
        return f"{type(self.whole).__name__} {self._title}: {self._thinned.part!r}"

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move, but keep tables of rotary frequencies in the precision in which the model made them."""
        with keeping_dtypes(self._thinned.context):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _decode(self, rest: tuple[Tensor, ...], **entering: Tensor) -> Tensor:
        """Call the module that has the decoder layers."""
        decoder = self.whole.get_submodule(self._thinned.path)
        with _unpacked(self._names):
            found: Tensor = decoder(**entering, **self._named(rest), use_cache=False)[0]
        return found

    def _named(self, rest: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self._names, rest, strict=True))


class Embedding(_Layer):
    """Tokens to hidden states."""

    def forward(self, tokens: Tensor, *rest: Tensor) -> Any:
        """Return (batch, sequence, hidden), and what is passed along."""
        hidden = self._decode(rest, input_ids=tokens)
        return (hidden, *rest) if rest else hidden


class DecoderLayer(_Layer):
    """One decoder layer."""

    def forward(self, hidden: Tensor, *rest: Tensor) -> Any:
        """Keep the shape (batch, sequence, hidden)."""
        with self._thinned.border.at(hidden) as zeros:
            hidden = self._decode(rest, inputs_embeds=zeros)
        return (hidden, *rest) if rest else hidden


class Head(_Layer):
    """Final norm, logits, loss."""

    def __init__(self, thinned: _Thinned, names: tuple[str, ...], title: str, *, shifted: bool) -> None:
        super().__init__(thinned, names, title)
        self._shifted = shifted

    def forward(self, hidden: Tensor, *rest: Tensor) -> Tensor:
        """Return the mean loss; the last tensor is the target."""
        *along, target = rest
        labels = {} if self._shifted else {"labels": target}
        named = self._named(tuple(along))
        with self._thinned.border.at(hidden) as zeros, _unpacked(self._names):
            found = self.whole(inputs_embeds=zeros, **named, **labels, use_cache=False, return_dict=True)
        if not self._shifted:
            return found.loss  # type: ignore[no-any-return]
        vocabulary = found.logits.shape[-1]
        after = target.contiguous()
        loss: Tensor = self.whole.loss_function(found.logits, after, vocab_size=vocabulary, shift_labels=after)
        return loss


@contextmanager
def _unpacked(names: Sequence[str]) -> Iterator[None]:
    """Within: positions that nobody gave are not searched for the borders of packed sequences.

    There are none, and each search would wait for the GPU, once in every layer.
    """
    search = "find_packed_sequence_indices"
    module = sys.modules.get("transformers.masking_utils")
    if "position_ids" in names or not hasattr(module, search):
        yield
        return
    original = getattr(module, search)
    setattr(module, search, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(module, search, original)


# -- taking a model apart


def _try(model: Any, layers: Sequence[nn.Module], inputs: Sequence[str]) -> None:
    """Run embedding, first decoder layer and head on three tokens."""
    tokens = torch.ones(2, 3, dtype=torch.int64, device=next(model.parameters()).device)
    flow: Any = tuple(tokens for _ in inputs)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for layer in (*layers[:2], layers[-1]):
                flow = flow if isinstance(flow, tuple) else (flow,)
                flow = layer(*flow, *((tokens,) if layer is layers[-1] else ()))
    except FAILURES as error:
        raise _refused(model, f"cannot be cut into layers: {first_line(error)}") from error


def _check(model: Any, inputs: Sequence[str]) -> None:
    name = type(model).__name__
    if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise BadInput(f"layers_of() got {name}, expected a causal language model of transformers")
    if not inputs or inputs[0] != "input_ids" or not set(inputs[1:]) <= set(PASSED_ON):
        raise BadInput(f"inputs are {list(inputs)}, expected 'input_ids' and any of {', '.join(PASSED_ON)} behind it")
    if getattr(model.config, "output_router_logits", False):
        raise BadInput(
            f"{name} is configured with output_router_logits, whose loss needs the routers of all layers at the end: "
            "expected False (runtime_torch.add_loss in a layer of your own does the same)"
        )


@dataclass
class _Anatomy:
    """Where a model's forward calls what."""

    model: Any
    path: str
    """Of the module that has the decoder layers."""
    layers: nn.ModuleList
    as_tuple: bool = False
    """Whether its decoder layers return a tuple."""
    before: list[nn.Module] = field(default_factory=list)
    after: list[nn.Module] = field(default_factory=list)
    context: list[nn.Module] = field(default_factory=list)

    @classmethod
    def of(cls, model: Any) -> _Anatomy:
        """Find the parts by one forward on three tokens without the decoder layers."""
        path, layers = _decoder_layers(model)
        found = cls(model, path, layers)
        try:
            if not found._try(as_tuple=False) and not found._try(as_tuple=True):
                raise _refused(model, "does not hand the output of each of its decoder layers to the next")
        except FAILURES as error:
            raise _refused(model, f"cannot be run without its decoder layers: {first_line(error)}") from error
        return found

    @property
    def depth(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    def thinned(self, index: int | None = None) -> _Thinned:
        """Return the model with decoder layer `index` alone; with what is before all (None), or behind (`depth`)."""
        border, skipped = _Border(), _Skipped(as_tuple=self.as_tuple)
        line: list[nn.Module] = [skipped] * self.depth
        before: list[nn.Module] = [_Absent(border) for _ in self.before]
        after: list[nn.Module] = [_Skipped() for _ in self.after]
        part: list[nn.Module]
        if index is None:
            part = before = self.before
        elif index == self.depth:
            line[-1] = _Skipped(border, as_tuple=self.as_tuple)
            part = after = self.after
        else:
            line[index] = self.layers[index]
            self.layers[index].register_forward_pre_hook(border.enter, with_kwargs=True)
            part = [self.layers[index]]
        instead: list[tuple[nn.Module, nn.Module]] = [(self.layers, nn.ModuleList(line))]
        instead += zip((*self.before, *self.after), (*before, *after), strict=True)
        instead += ((one, one) for one in self.context)
        return _Thinned(
            _copied(self.model, instead), self.path, nn.ModuleList(part), nn.ModuleList(self.context), border
        )

    def _try(self, *, as_tuple: bool) -> bool:
        """Run the model with decoder layers that do nothing; return whether each got what the one before returned."""
        notes = _Notes(as_tuple)
        line: list[nn.Module] = [_Noting(notes) for _ in self.layers]
        parts = list(self._parts())
        whole = _copied(self.model, [(self.layers, nn.ModuleList(line)), *((part, part) for part in parts)])
        tokens = torch.zeros(2, 3, dtype=torch.int64, device=next(self.model.parameters()).device)
        hooks = [part.register_forward_hook(notes.part) for part in parts]
        try:
            with torch.random.fork_rng(devices=[]), _unpacked(()):
                whole(input_ids=tokens, use_cache=False)
        except FAILURES:
            if as_tuple:
                raise
            return False
        finally:
            for hook in hooks:
                hook.remove()
        if not notes.in_a_row or len(notes.given) != self.depth:
            return False
        if notes.trained:
            raise _refused(self.model, f"gives its decoder layers {notes.trained}, which is trained, too")
        self.as_tuple = as_tuple
        self._sort(parts, notes)
        return True

    def _sort(self, parts: Iterable[nn.Module], notes: _Notes) -> None:
        """Tell what belongs to the embedding, to the head, and to all."""
        for part in parts:
            called = notes.called.get(part, set())
            has_weights = next(part.parameters(), None) is not None
            if not has_weights and part not in notes.flows:
                self.context.append(part)
            elif called <= {0}:
                self.before.append(part)
            elif called == {self.depth}:
                self.after.append(part)
            else:
                raise _refused(self.model, f"calls {type(part).__name__} between its decoder layers, or more than once")

    def _parts(self) -> Iterator[nn.Module]:
        """Yield what the model has beside its decoder layers, and what they lie in."""
        containers = [self.model]
        for name in self.path.split("."):
            containers.append(getattr(containers[-1], name))
        for container in containers:
            if own := [name for name, _ in container.named_parameters(recurse=False)]:
                raise _refused(self.model, f"has the parameter {own[0]} outside of its layers, embedding and head")
            yield from (part for part in container.children() if part not in (*containers, self.layers))


@dataclass
class _Notes:
    """What happens in a forward without decoder layers."""

    as_tuple: bool
    given: list[Tensor] = field(default_factory=list)
    """What the layers returned."""
    in_a_row: bool = True
    trained: str = ""
    called: dict[nn.Module, set[int]] = field(default_factory=dict)
    """Parts: behind how many layers they were called."""
    flows: set[nn.Module] = field(default_factory=set)
    """Parts that return hidden states."""

    def part(self, module: nn.Module, _args: Any, found: Any) -> None:
        """Note a call; a forward hook."""
        self.called.setdefault(module, set()).add(len(self.given))
        if isinstance(found, Tensor) and found.dim() == 3 and found.is_floating_point():
            self.flows.add(module)

    def layer(self, x: Tensor, rest: Mapping[str, Any]) -> Any:
        """Note the call of a decoder layer, and return what none has returned yet."""
        self.in_a_row &= not self.given or x is self.given[-1]
        for name, value in rest.items():
            tensors = value if isinstance(value, tuple | list) else (value,)
            if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
                self.trained = name
        self.given.append(torch.zeros_like(x))
        return (self.given[-1],) if self.as_tuple else self.given[-1]


class _Noting(nn.Module):
    """In place of a decoder layer: notes how it is called."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, *args: Any, **named: Any) -> Any:
        """Take the hidden states wherever they are."""
        x, *rest = args or (named.pop("hidden_states"),)
        return self.notes.layer(x, {**named, **{f"argument {place}": one for place, one in enumerate(rest, 1)}})


def _decoder_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """Return the decoder layers, and the path of what has them."""
    depth = getattr(model.config, "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and "." in name
    ]
    if not found:
        raise _refused(model, f"has no list of {depth} decoder layers")
    name, layers = found[0]
    path = name.rpartition(".")[0]
    decoder = model.get_submodule(path)
    if not {"input_ids", "inputs_embeds"} <= set(inspect.signature(decoder.forward).parameters):
        raise _refused(model, f"has its layers in {path}, which is not called with input_ids or inputs_embeds")
    if getattr(decoder, "layerdrop", 0):
        raise BadInput(
            f"{type(model).__name__} is configured with layerdrop {decoder.layerdrop}, which leaves out layers that "
            "the plan has: expected 0"
        )
    return path, layers


def _copied(model: Any, instead: Iterable[tuple[nn.Module, nn.Module]]) -> Any:
    """Return a copy of the model with other modules in place of some; its configuration is the same object."""
    memo: dict[int, Any] = {id(module): other for module, other in instead}
    for module in model.modules():
        config = getattr(module, "config", None)
        memo[id(config)] = config
    return copy.deepcopy(model, memo)


def _refused(model: Any, why: str) -> BadInput:
    return BadInput(f"{type(model).__name__} {why}: expected a decoder-only model that only runs its layers in a row")
