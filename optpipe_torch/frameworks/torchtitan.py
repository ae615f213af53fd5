"""torchtitan's `pipelining_fn` with our replay in the place of torch's pipeline engine, memory operations included.

The calls are those of torchtitan at commit b5bcd76c (21 August 2026): `ModelSpec.pipelining_fn` as `trainer.py` calls
it, `pp_schedule.step` and `eval` with microbatches that the trainer has cut (`arg_mbs`, `kwarg_mbs`, `target_mbs`).
torchtitan is not imported. Its models run with any of their modules set to None, which is how torchtitan cuts them
itself: each of our layers is the model with one part left, and a model part of the trainer by itself, so that
parallelize_fn, weights, optimizers and checkpoints see the model's own names.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from optpipe_compiler.documents.units import counted
from optpipe_compiler.errors import BadInput
from optpipe_torch.frameworks.common import keeping_dtypes, loaded
from runtime_torch.conform import BYTES_TOLERANCE
from runtime_torch.runner import Runner
from runtime_torch.stages import build_stages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from optpipe_compiler.documents import ir
    from runtime_torch.bundles import Boundary

FIRST, BLOCKS, LAST = "tok_embeddings", "layers", ("norm", "lm_head")
"""The modules of torchtitan's decoders."""

Built = tuple["PlannedSchedule", list[nn.Module], bool, bool]
"""What torchtitan's trainer takes: the schedule, this rank's model parts, whether it has the first and last stage."""


def planned(config: Any, schedule: ir.Schedule | Path | str, **options: Any) -> Any:
    """Return a recipe's `Trainer.Config` with the pipeline of a schedule; called once, on every rank.

    Set are the model's `pipelining_fn`, the pipeline's degree and microbatches, the rank that logs, and what the replay
    needs off: torchtitan's activation checkpointing, compilation of the model, CUDA graphs. `options` are those of
    `pipelining`.
    """
    plan = loaded(schedule)
    _refuse_older(config)
    config.model_spec = replace(config.model_spec, pipelining_fn=pipelining(plan, **options))
    config.parallelism.pipeline_parallel_degree = plan.setup.devices
    config.parallelism.num_pp_microbatches = plan.setup.microbatches
    # beside its own pipelining_fn, torchtitan reads from this name only which rank logs the loss: first or last
    config.parallelism.pipeline_parallel_schedule = "ZBVZeroBubble" if plan.stages[-1].device == 0 else "1F1B"
    config.activation_checkpoint = None
    config.compile.components = [part for part in config.compile.components if part != "model"]
    config.training.disable_cuda_graphs = True
    return config


def pipelining(
    schedule: ir.Schedule | Path | str, *, bytes_tolerance: float | None = BYTES_TOLERANCE
) -> Callable[..., Built]:
    """Return a `pipelining_fn` for torchtitan's `ModelSpec` that replays the schedule.

    `bytes_tolerance` is that of `Runner`. The function raises BadInput for what the replay does not do: tensor, context
    and expert parallelism, mixtures of experts, models with other parts than a decoder's, tied weights, activation
    checkpointing, compiled models, parameters on the host.
    """
    plan = loaded(schedule)

    def pipelining_fn(
        model: Any,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        compile_config: Any,
        ac_config: Any,
        device: torch.device,
        parallelize_fn: Callable[..., nn.Module],
        loss_fn: Callable[..., Any],
        model_config: Any = None,
        **others: Any,
    ) -> Built:
        """Return the schedule, this rank's model parts, and whether it has the first and the last stage."""
        del model_config
        _check(plan, parallel_dims, training, parallelism, compile_config, ac_config)
        everything = parts_of(model)
        if len(everything) != plan.setup.layers:
            raise _refused(
                f"the model has {counted(len(everything), 'layer')} (embedding, blocks, norm and head), expected "
                f"{plan.setup.layers} as the schedule has: profile this model, without halves and parts of the head"
            )
        mesh = parallel_dims.get_mesh("pp")
        rank = mesh.get_local_rank()
        embedding = copy.deepcopy(everything[0]).to("meta")
        mine = {
            index: parallelize_fn(
                everything[index],
                parallel_dims=parallel_dims,
                training=training,
                parallelism=parallelism,
                compile_config=compile_config,
                ac_config=ac_config,
                **others,
            )
            for stage in plan.stages_of(rank)
            for index in range(*stage.layers)
        }
        last = plan.setup.layers - 1
        sharded = any(isinstance(module, FSDPModule) for part in mine.values() for module in part.modules())
        dtype = getattr(torch, training.mixed_precision_param) if sharded else None
        found = PlannedSchedule(
            plan,
            {i: LastTitanLayer(part, loss_fn) if i == last else TitanLayer(part) for i, part in mine.items()},
            rank,
            device,
            mesh.get_group(),
            partial(_border, embedding, dtype),
            bytes_tolerance,
        )
        return found, list(mine.values()), found.has_first_stage, found.has_last_stage

    return pipelining_fn


@dataclass
class PlannedSchedule:
    """Stands where torchtitan's trainer has torch's `_PipelineSchedule`: `step` and `eval`, with cut microbatches.

    The runner is built at the first of them, when the trainer has given the parameters their memory and values.
    """

    schedule: ir.Schedule
    _layers: Mapping[int, TitanLayer]
    _rank: int
    _device: torch.device
    _group: dist.ProcessGroup
    _border: Callable[[Boundary], Boundary]
    _tolerance: float | None
    runner: Runner | None = None

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank takes the tokens."""
        return self.schedule.stages[0].device == self._rank

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank has the losses."""
        return self.schedule.stages[-1].device == self._rank

    def step(self, *, losses: list[Tensor] | None = None, return_outputs: bool = False, **given: Any) -> None:
        """Run all microbatches once; add the gradients of the sum of their losses, and give `losses` each of them.

        Given are, by microbatch: `arg_mbs`, the tokens, where the first stage is, `kwarg_mbs`, the model's keyword
        arguments, on every rank, `target_mbs`, the labels, where the last stage is; and `loss_kwargs` for all losses.
        """
        batch = self._batch(return_outputs=return_outputs, **given)
        weights = [1.0] * self.schedule.setup.microbatches
        runner = self._started(batch)
        runner.step(*batch.inputs, target=batch.target, weights=weights, keywords=batch.keywords, losses=losses)

    def eval(self, *, losses: list[Tensor] | None = None, return_outputs: bool = False, **given: Any) -> None:
        """Run the microbatches forward only and give `losses` the loss of each; the arguments are as in `step`."""
        batch = self._batch(return_outputs=return_outputs, **given)
        runner = self._started(batch)
        runner.eval(*batch.inputs, target=batch.target, keywords=batch.keywords, losses=losses)

    def _batch(
        self,
        *,
        arg_mbs: Sequence[tuple[Tensor, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> _Batch:
        """Join the microbatches, which the runner cuts again."""
        if return_outputs:
            raise _refused("return_outputs=True asks for the last stage's outputs, expected False")
        count = self.schedule.setup.microbatches
        tokens = [arguments[0] for arguments in arg_mbs or ()]
        given = [{}] * count if kwarg_mbs is None else kwarg_mbs
        for name, several in (("arg_mbs", tokens), ("target_mbs", target_mbs or ()), ("kwarg_mbs", given)):
            if several and len(several) != count:
                raise _refused(f"the trainer gave {len(several)} microbatches in {name}, expected {count}")
            shapes = {tuple(one.shape) for one in several if isinstance(one, Tensor)}
            if len(shapes) > 1:
                raise _refused(f"the microbatches in {name} have the shapes {sorted(shapes)}, expected one shape")
        if any(len(arguments) != 1 for arguments in arg_mbs or ()):
            raise _refused("a microbatch has several positional arguments, expected the tokens alone")
        return _Batch(
            [torch.cat(tokens)] if tokens else [],
            torch.cat(list(target_mbs)) if target_mbs else None,
            [{"given": _Given(named, loss_kwargs or {})} for named in given],
            (tuple(tokens[0].shape), tokens[0].dtype) if tokens else None,
        )

    def _started(self, batch: _Batch) -> Runner:
        """Return the runner, built when it is first needed, on all ranks together."""
        if self.runner is not None:
            return self.runner
        told = [batch.form]
        first = self.schedule.stages[0].device
        dist.broadcast_object_list(told, group=self._group, group_src=first, device=self._device)
        if told[0] is None:
            raise _refused(f"rank {first} of the pipeline got no tokens in arg_mbs, but has the first stage")
        border = self._border(told[0])
        for layer in self._layers.values():
            layer.begin()
        stages = build_stages(self.schedule, self._layers, self._rank, self._device)
        self.runner = Runner(
            self.schedule, stages, lambda _: border, group=self._group, bytes_tolerance=self._tolerance
        )
        return self.runner


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the trainer gave, as the runner takes it; `form`: shape and dtype of a microbatch's tokens."""

    inputs: list[Tensor]
    target: Tensor | None
    keywords: list[dict[str, object]]
    form: Boundary | None


@dataclass(frozen=True, slots=True)
class _Given:
    """Of one microbatch: keyword arguments of the model and of the loss. The trainer holds their tensors to the end of
    the step, so that they are no activations."""

    model: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)


# -- layers


class TitanLayer(nn.Module):
    """The model with one part left: its embedding, or one block."""

    bytes_per_parameter: int | None = None
    """Of weights, gradients and optimizer's state, for `profile`; None: as in the dtype that is measured."""

    def __init__(self, part: Any, context: int = 0) -> None:
        super().__init__()
        self.part = part
        self._context = context
        """Tokens of a document where nobody gives positions, as in `profile`; 0: the model is called without."""
        self._made: dict[tuple[int, torch.device], dict[str, Any]] = {}
        """What stands for the trainer's keyword arguments, made once: the trainer makes them outside of the layers."""

    def __repr__(self) -> str:
        """Show the module that is left, without its number: blocks of one kind look alike."""
        left = [child for child in self.part.children() if not isinstance(child, nn.ModuleDict)]
        return f"{type(self.part).__name__} {[*left, *self.part.get_submodule(BLOCKS).children()]!r}"

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Move, but keep buffers, such as complex rotary factors, in the dtype in which the model made them."""
        with keeping_dtypes(self.part):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, x: Tensor, *, given: _Given | None = None) -> Tensor:
        """Tokens to hidden states, or hidden states to hidden states."""
        return self._run(x, given)

    def begin(self) -> None:
        """Before the first step."""

    def _run(self, x: Tensor, given: _Given | None) -> Tensor:
        named = self._alone(x) if given is None else given.model
        found: Tensor = self.part(x, **named)
        return found

    def _alone(self, x: Tensor) -> dict[str, Any]:
        """What the trainer would give for documents that are as long as the context."""
        if not self._context:
            return {}
        key = x.shape[0], x.device
        if key not in self._made:
            positions = torch.arange(x.shape[0], device=x.device) % self._context
            self._made[key] = {"positions": positions}
            with suppress(TypeError):  # attention without masks, as torchtitan says it
                self._made[key]["attention_masks"] = self.part.get_attention_masks(positions=positions)
        return self._made[key]


class LastTitanLayer(TitanLayer):
    """The model with norm and head left, and the loss."""

    def __init__(self, part: Any, loss_fn: Any, context: int = 0) -> None:
        super().__init__(part, context)
        while hasattr(loss_fn, "set_lm_head"):  # chunked: runs head and backward itself, chunk by chunk
            loss_fn = loss_fn.loss_fn
        self._loss_fn = loss_fn

    def forward(self, x: Tensor, target: Tensor, *, given: _Given | None = None) -> Tensor:  # type: ignore[override]
        """Return the loss of a microbatch, a sum over its tokens divided by what the trainer gives."""
        found = self._loss_fn(self._run(x, given), target, **({} if given is None else given.loss))
        loss: Tensor = found[0] if isinstance(found, tuple) else found
        return loss

    def begin(self) -> None:
        """The trainer lets a chunked loss run the head; here the model does."""
        self.part._skip_lm_head = False


def layers_of(config: Any) -> tuple[list[Callable[[], nn.Module]], Callable[[torch.Generator, int], Any]]:
    """Return the layers and the data of a recipe's model, for `optpipe profile --model module:function`.

    A sample is a token, since torchtitan's microbatches are flat: `--microbatch-size` is the recipe's
    `num_tokens_per_microbatch_per_dp_rank`. Layers are made one by one, with torchtitan's initial weights.
    """
    _refuse_older(config)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    count = len(parts_of(model))
    loss, context = config.loss.build(compile_config=config.compile), config.training.max_context_length
    vocabulary = spec.model.vocab_size

    def make(index: int) -> nn.Module:
        part = copy.deepcopy(parts_of(model)[index]).to_empty(device="cpu")
        with torch.no_grad(), torch.device("cpu"):
            part.init_weights(buffer_device=None)
        layer = LastTitanLayer(part, loss, context) if index == count - 1 else TitanLayer(part, context)
        layer.bytes_per_parameter = _bytes_per_parameter(config)
        return layer

    def batch(generator: torch.Generator, samples: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (samples + 1,), generator=generator)
        return tokens[:-1].clone(), tokens[1:].clone()

    return [partial(make, index) for index in range(count)], batch


def _bytes_per_parameter(config: Any) -> int:
    """Return what a rank keeps during a step, as torchtitan always wraps in FSDP2, without a second replica, too.

    Gathered weights in the dtype of mixed precision and whole gradients in that of the reduction, for all microbatches;
    its share of weights, of both moments of AdamW and, of several shares, of the reduced gradients.
    """
    training = config.training
    weights, gathered, reduced = (
        int(getattr(torch, name).itemsize)
        for name in (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
    )
    shares: int = max(1, config.parallelism.data_parallel_shard_degree)
    return gathered + reduced + -(-(3 * weights + (weights if shares > 1 else 0)) // shares)


def parts_of(model: Any) -> list[Any]:
    """Return the model once for each layer, with that part alone left: embedding, each block, norm and head.

    The parts share the model's modules, which must not be used besides. Raises BadInput for another model than a
    decoder of torchtitan.
    """
    names = [name for name, _ in model.named_children()]
    if names != [FIRST, BLOCKS, *LAST] or not isinstance(model.get_submodule(BLOCKS), nn.ModuleDict):
        raise _refused(f"the model has the parts {names}, expected {[FIRST, BLOCKS, *LAST]}; blocks in a ModuleDict")
    own = [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
    if own:
        raise _refused(f"the model has {own[0]} outside of its parts, expected none")
    if getattr(model, "enable_weight_tying", False):
        raise _refused("the model ties embedding and head, expected enable_weight_tying=False")
    blocks = list(model.get_submodule(BLOCKS))
    for name in blocks:
        if getattr(model.get_submodule(f"{BLOCKS}.{name}"), "moe", None) is not None:
            raise _refused(
                f"block {name} is a mixture of experts, expected dense blocks: it counts its tokens in every forward, "
                "also in one that is repeated"
            )
    return [_left(model, (FIRST,)), *(_left(model, (), block) for block in blocks), _left(model, LAST)]


def _left(model: Any, kept: Sequence[str], block: str | None = None) -> Any:
    """Return the model with these parts, and this block."""
    part, blocks = _twin(model), _twin(model.get_submodule(BLOCKS))
    for name in list(blocks):
        if name != block:
            del blocks[name]
    for name in (FIRST, *LAST):
        if name not in kept:
            setattr(part, name, None)
    setattr(part, BLOCKS, blocks)
    return part


def _twin(module: Any) -> Any:
    """Return a module with the same children, and with dictionaries of children, hooks and buffers of its own."""
    twin = copy.copy(module)
    for name, value in vars(twin).items():
        if isinstance(value, dict):
            vars(twin)[name] = copy.copy(value)
    return twin


def _border(embedding: Any, dtype: torch.dtype | None, tokens: Boundary) -> Boundary:
    """Return shape and dtype of what passes between layers, which is what the embedding returns; `dtype`: that of
    parameters in mixed precision."""
    with torch.no_grad():
        hidden = embedding(torch.empty(tokens[0], dtype=tokens[1], device="meta"))
    return tuple(hidden.shape), dtype or hidden.dtype


# -- what is refused


def _check(
    plan: ir.Schedule, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any, ac_config: Any
) -> None:
    """Raise BadInput where the recipe asks for what the replay does not do."""
    if parallel_dims.pp != plan.setup.devices:
        raise _refused(
            f"parallelism.pipeline_parallel_degree is {parallel_dims.pp}, expected {plan.setup.devices}: the devices "
            "of the schedule"
        )
    microbatches = getattr(parallelism, "num_pp_microbatches", None)
    if microbatches != plan.setup.microbatches:
        raise _refused(
            f"parallelism.num_pp_microbatches is {microbatches}, expected {plan.setup.microbatches} as the schedule has"
        )
    if not isinstance(plan.setup.units, msgspec.UnsetType):
        raise _refused("the schedule has slices or microbatches of unequal length, expected one without")
    others = parallel_dims.tp_enabled, parallel_dims.cp_enabled, parallel_dims.ep_enabled
    for kind, is_on in zip(("tensor", "context", "expert"), others, strict=True):
        if is_on:
            raise _refused(f"parallelism.{kind}_parallel_degree is above 1, expected 1 beside a planned pipeline")
    if ac_config is not None:
        raise _refused("activation_checkpoint is set, expected None: the schedule decides what is recomputed")
    if compile_config.enable and "model" in compile_config.components:
        raise _refused("compile.components has 'model', expected none: the replay splits the layers' backwards")
    if training.enable_cpu_offload:
        raise _refused("training.enable_cpu_offload is on, expected off: the replay keeps weights on the device")


def _refuse_older(config: Any) -> None:
    if not hasattr(config.parallelism, "num_pp_microbatches"):
        raise _refused(
            "the recipe has no parallelism.num_pp_microbatches, expected torchtitan at commit b5bcd76 (August 2026) or "
            "later; release 0.3.0 is older, and optpipe export --to torchtitan is for it"
        )


def _refused(what: str) -> BadInput:
    return BadInput(f"torchtitan: {what}")
