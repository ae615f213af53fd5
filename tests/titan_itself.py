"""torchtitan's own Llama 3 (debugmodel), its parallelize_fn and chunked loss, in a planned pipeline: equal gradients.

A rank of torchrun; the argument is the spmd_backend. What a CPU lacks is put in its place: flex attention, which has
no backward there, is dense attention under the same mask; reductions are sums, since gloo has no product within a sum.
"""

from __future__ import annotations

import sys
import zlib
from random import Random
from types import SimpleNamespace

import torch
import torch.distributed as dist
from small_schedules import Builder, Shape
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims, utils
from torchtitan.models.common import attention
from torchtitan.models.llama3 import model_registry

from optpipe_compiler.documents.profile import P2P, Layer, Link, Machine, Profile
from optpipe_torch.frameworks.torchtitan import pipelining

TOKENS, MICROBATCHES, LAYERS = 64, 4, 8


def dense(q, k, v, *, block_mask, scale=None, enable_gqa=False, **_others):
    n = torch.arange(q.shape[-2])
    mask = block_mask.mask_mod(torch.tensor(0), torch.tensor(0), n[:, None], n[None])
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out, None


def plan():
    layer = Layer(
        name="layer",
        forward_ns=10**6,
        backward_input_ns=10**6,
        backward_weight_ns=10**6,
        saved_bytes=10**9,
        output_bytes=TOKENS * 256 * 4,
    )
    machine = Machine(devices=2, p2p=[P2P()], links=[Link(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9)])
    shape = Shape(
        layers_per_stage=LAYERS // 2,
        microbatches=MICROBATCHES,
        ranges=lambda stage, _: [("offload", 4 * stage, 4 * stage + 1), ("recompute", 4 * stage + 1, 4 * stage + 2)],
    )
    return Builder(shape, Profile(name="hand", machine=machine, layers=[layer] * LAYERS), Random(0)).build()


@torch.no_grad()
def fill(part):
    """Values by the parameters' names, so that every cut of the model has the same."""
    part.to_empty(device="cpu")
    part.init_weights(buffer_device=None)
    for name, parameter in part.named_parameters():
        value = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.05
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.copy_(value)
    for module in part.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def microbatches(replica):
    generator = torch.Generator().manual_seed(replica)
    return [torch.randint(2048, (2, TOKENS), generator=generator).unbind() for _ in range(MICROBATCHES)]


def main(backend):
    parallel_dims.device_type = "cpu"
    attention.FlexAttention._compiled_flex_attn = dense
    attention._compiled_create_block_mask = create_block_mask
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    replicas = dist.get_world_size() // 2
    spec = model_registry("debugmodel", attn_backend="flex")
    parallelism = ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=MICROBATCHES, spmd_backend=backend)
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    utils.set_spmd_backend(backend)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    loss_fn = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=2048)).build(
        compile_config=CompileConfig()
    )
    with torch.device("meta"):
        model, alone = spec.model.build(), spec.model.build()
    schedule, parts, is_first, is_last = pipelining(plan())(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=loss_fn,
    )
    for part in (*parts, alone):
        fill(part)
    if is_last:
        loss_fn.set_lm_head(parts[-1].lm_head)
        parts[-1]._skip_lm_head = True
    positions = torch.arange(TOKENS) % 20
    masks = alone.get_attention_masks(positions=positions)
    count = torch.tensor(TOKENS * MICROBATCHES * replicas)
    mine = microbatches(dims.get_mesh("batch").get_local_rank() if replicas > 1 else 0)
    with utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=False)():
        schedule.step(
            arg_mbs=[(tokens,) for tokens, _ in mine] if is_first else None,
            kwarg_mbs=[{"positions": positions, "attention_masks": masks}] * MICROBATCHES,
            target_mbs=[labels for _, labels in mine] if is_last else None,
            losses=[] if is_last else None,
            loss_kwargs={"global_valid_tokens": count},
            return_outputs=False,
        )
    for tokens, labels in (one for replica in range(replicas) for one in microbatches(replica)):
        out = alone(tokens, positions=positions, attention_masks=masks)
        (functional.cross_entropy(out.float(), labels, reduction="sum") / count).backward()
    wanted = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in (item for part in parts for item in part.named_parameters()):
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        difference = (found - wanted[name]).abs().max() / wanted[name].abs().max()
        assert difference < 1e-5, (name, difference)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
