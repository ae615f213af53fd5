"""What torchtitan's trainer does around a pipeline, and a small decoder: a stand-in where torchtitan is not installed.

The order of calls, their arguments and what the trainer changes in between follow torchtitan at commit
b5bcd76c66d0acb1a08b176d9639425bc55e0b2a: `Trainer.__init__`, `post_dataloading_process`, `pp_forward_backward_step`,
`_forward_backward_body` and `train_step` of torchtitan/trainer.py; `Validator.validate` of components/validate.py;
`Decoder.forward` of models/common/decoder.py (tokens without a batch dimension, parts that are None);
`apply_fsdp_to_decoder` of distributed/fsdp.py; what the trainer asks of `ChunkedLossWrapper` of components/loss.py.
"""

from __future__ import annotations

import importlib
import os
import sys
import zlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

DIM, VOCABULARY, BLOCKS, IGNORED = 16, 40, 4, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)
        self.register_buffer("turns", torch.empty(64, DIM), persistent=False)

    def forward(self, x, attention_masks, positions):
        at = x if positions is None else x + self.turns[positions].to(x.dtype)
        q, k, v = self.qkv(self.norm(at))[None].chunk(3, -1)
        is_causal = attention_masks is None
        x = x + functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_masks, is_causal=is_causal)[0]
        return x + self.down(functional.silu(self.up(x)))


class Decoder(nn.Module):
    """As torchtitan's: any part may be None."""

    _skip_lm_head = False

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(index): Block() for index in range(BLOCKS)})
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens, positions=None, attention_masks=None):
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = layer(h, attention_masks, positions)
        h = self.norm(h) if self.norm is not None else h
        if self._skip_lm_head:
            return h
        return self.lm_head(h) if self.lm_head is not None else h

    def get_attention_masks(self, positions):
        """Causal within each document; a document begins where positions do."""
        if not self.config.masks:
            raise TypeError("Only VarlenAttention and FlexAttention support attention masks, got None")
        documents = (positions == 0).cumsum(0)
        return torch.tril(documents[:, None] == documents[None])[None]

    def init_weights(self, buffer_device=None):
        """Values by the parameters' names, so that every cut of the model has the same."""
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value = torch.randn(parameter.shape, generator=generator) * 0.3
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            parameter.copy_(value)
        for block in self.layers.values():
            block.turns.copy_(torch.sin(torch.arange(64.0)[:, None] / torch.arange(1, DIM + 1)))


@dataclass
class ModelConfig:
    masks: bool = True
    vocab_size: int = VOCABULARY

    def update_from_config(self, *, config):
        """Nothing here depends on the recipe."""

    def build(self):
        return Decoder(self)


class CrossEntropy:
    """The sum over the tokens that count, over the number that the trainer gives."""

    def __call__(self, pred, labels, global_valid_tokens=None):
        loss = functional.cross_entropy(pred.float(), labels, reduction="sum", ignore_index=IGNORED)
        return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}


class Chunked:
    """A loss that runs head and backward itself; without a pipeline here simply the head and the loss."""

    def __init__(self, *, compile_config=None):
        self.loss_fn, self.lm_head, self.compile_config = CrossEntropy(), None, compile_config

    def set_lm_head(self, lm_head):
        self.lm_head = lm_head

    def __call__(self, pred, labels, global_valid_tokens=None, **_others):
        return self.loss_fn(self.lm_head(pred), labels, global_valid_tokens)


def parallelize(model, *, parallel_dims, training, parallelism, compile_config, ac_config, dump_folder):
    """As `apply_fsdp_to_decoder`: embedding, norm with head, each block, and the whole."""
    if parallel_dims.mesh is None or "dp" not in parallel_dims.mesh.mesh_dim_names:
        return model
    dtype = getattr(torch, training.mixed_precision_param)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard = partial(fully_shard, mesh=parallel_dims.mesh["dp"], mp_policy=policy, reshard_after_forward=False)
    if model.tok_embeddings is not None:
        shard(model.tok_embeddings)
    if model.norm is not None:
        shard([model.norm, model.lm_head])
    for block in model.layers.values():
        shard(block)
    shard(model)
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no product within a sum
    return model


@dataclass
class ModelSpec:
    model: ModelConfig
    parallelize_fn: object = parallelize
    pipelining_fn: object = None


@dataclass
class Config:
    """The part of torchtitan's `Trainer.Config` that matters to a pipeline."""

    model_spec: ModelSpec = field(default_factory=lambda: ModelSpec(ModelConfig()))
    loss: object = field(default_factory=lambda: SimpleNamespace(build=Chunked))
    training: object = field(
        default_factory=lambda: SimpleNamespace(
            num_tokens_per_microbatch_per_dp_rank=64,
            num_tokens_per_train_step=256,
            max_context_length=16,
            dtype="float32",
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
            enable_cpu_offload=False,
            disable_cuda_graphs=False,
            steps=3,
        )
    )
    parallelism: object = field(
        default_factory=lambda: SimpleNamespace(
            pipeline_parallel_degree=1, num_pp_microbatches=1, data_parallel_shard_degree=-1
        )
    )
    activation_checkpoint: object = "selective"
    compile: object = field(default_factory=lambda: SimpleNamespace(enable=False, components=["model", "loss"]))
    dump_folder: str = "outputs"
    data_parallel: int = 1


def llama3_debugmodel():
    return Config()


class Dims:
    """torchtitan's `ParallelDims`."""

    tp_enabled = cp_enabled = ep_enabled = False

    def __init__(self, config):
        self.pp, self.dp = config.parallelism.pipeline_parallel_degree, config.data_parallel
        wanted = {name: size for name, size in (("pp", self.pp), ("dp", self.dp)) if size > 1}
        self.mesh = init_device_mesh("cpu", tuple(wanted.values()), mesh_dim_names=tuple(wanted)) if wanted else None

    @property
    def pp_enabled(self):
        return self.pp > 1

    def get_mesh(self, name):
        return self.mesh[name]

    def rank(self, name):
        return self.mesh[name].get_local_rank() if self.mesh is not None and name in self.mesh.mesh_dim_names else 0


class Trainer:
    Config = Config

    def __init__(self, config):
        self.config = config
        self.dims = Dims(config)
        spec = config.model_spec
        spec.model.update_from_config(config=config)
        with torch.device("meta"):
            model = spec.model.build()
        self.loss_fn = config.loss.build(compile_config=config.compile)
        common = {
            "parallel_dims": self.dims,
            "training": config.training,
            "parallelism": config.parallelism,
            "compile_config": config.compile,
            "ac_config": config.activation_checkpoint,
            "dump_folder": config.dump_folder,
        }
        self.has_first = self.has_last = True
        if self.dims.pp_enabled:
            self.schedule, self.parts, self.has_first, self.has_last = spec.pipelining_fn(
                model,
                **common,
                device=torch.device("cpu"),
                model_config=spec.model,
                parallelize_fn=spec.parallelize_fn,
                loss_fn=self.loss_fn,
            )
        else:
            self.parts = [spec.parallelize_fn(model, **common)]
        for part in self.parts:
            part.to_empty(device="cpu")
            with torch.no_grad():
                part.init_weights(buffer_device=None)
            part.train()
        if hasattr(self.loss_fn, "set_lm_head") and self.has_last:
            self.loss_fn.set_lm_head(self.parts[-1].lm_head)
            self.parts[-1]._skip_lm_head = True
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in self.parts]

    def batch(self, step):
        """The microbatches of a replica: documents of unequal length, some labels ignored."""
        count = self.config.parallelism.num_pp_microbatches if self.dims.pp_enabled else 1
        length = self.config.training.num_tokens_per_microbatch_per_dp_rank
        accumulated = self.config.training.num_tokens_per_train_step // (length * count * self.dims.dp)
        generator = torch.Generator().manual_seed(step * 1000 + self.dims.rank("dp"))
        for _ in range(accumulated):
            group = []
            for _ in range(count):
                tokens, labels = torch.randint(VOCABULARY, (2, length), generator=generator)
                labels[torch.rand(length, generator=generator) < 0.2] = IGNORED
                group.append(({"input": tokens, "positions": torch.arange(length) % (9 + step)}, labels))
            yield group

    def prepared(self, inputs):
        given = {name: value for name, value in inputs.items() if name != "input"}
        if self.config.model_spec.model.masks:
            given["attention_masks"] = self.parts[0].get_attention_masks(positions=given["positions"])
        return inputs["input"], given

    def pipelined(self, group, call, **options):
        args, kwargs, targets = [], [], [] if self.has_last else None
        for inputs, labels in group:
            tokens, given = self.prepared(inputs)
            if self.has_first:
                args.append((tokens,))
            kwargs.append(given)
            if targets is not None:
                targets.append(labels)
        losses = [] if self.has_last else None
        call(arg_mbs=args if self.has_first else None, kwarg_mbs=kwargs, target_mbs=targets, losses=losses, **options)
        return torch.sum(torch.stack(losses)) if self.has_last else None

    def train_step(self, step):
        """Return the step's loss where the last stage is; gradients stay."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        groups = list(self.batch(step))
        count = torch.stack([(labels != IGNORED).sum() for group in groups for _, labels in group]).sum()
        if self.dims.dp > 1:
            dist.all_reduce(count, group=self.dims.get_mesh("dp").get_group())
        total = torch.zeros(())
        for group in groups:
            if self.dims.pp_enabled:
                options = {"loss_kwargs": {"global_valid_tokens": count}, "return_outputs": False}
                loss = self.pipelined(group, self.schedule.step, **options)
            else:
                ((inputs, labels),) = group
                tokens, given = self.prepared(inputs)
                loss, _ = self.loss_fn(self.parts[0](tokens, **given), labels, count)
                loss.backward()
            if loss is not None:
                total += loss.detach()
        for optimizer in self.optimizers:
            optimizer.step()
        return total.item() if self.has_last else None

    @torch.no_grad()
    def validate(self, step):
        """Return the sum of a batch's losses where the last stage is."""
        for part in self.parts:
            part.eval()
        found = None
        for group in self.batch(step):
            if self.dims.pp_enabled:
                loss = self.pipelined(group, self.schedule.eval)
            else:
                ((inputs, labels),) = group
                tokens, given = self.prepared(inputs)
                loss, _ = self.loss_fn(self.parts[0](tokens, **given), labels)
            found = loss if found is None or loss is None else found + loss
        for part in self.parts:
            part.train()
        return None if found is None else found.item()

    def gradients(self):
        """By the model's names, whole."""
        named = [item for part in self.parts for item in part.named_parameters()]
        grads = {name: parameter.grad for name, parameter in named}
        return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def main():
    """`python -m torchtitan.train --module MODULE --config FUNCTION`."""
    options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    sys.path.insert(0, str(Path.cwd()))
    config = getattr(importlib.import_module(options["--module"]), options["--config"])()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    trainer = Trainer(config)
    for step in range(config.training.steps):
        loss = trainer.train_step(step)
        if loss is not None and trainer.dims.rank("dp") == 0:
            print(f"step {step + 1}: loss {loss:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
