"""The costs of one model under many degrees of parallelism: layers are counted once per tensor parallel degree and
microbatch size; everything else follows from these counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from optpipe_torch.estimates.estimate import BYTES_PER_PARAMETER, EstimateOptions, count_layers, estimate
from optpipe_torch.estimates.time import LINK_SHARE, work_ns

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile
    from optpipe_torch.estimates.count import Counted

STEP = ("forward", "backward_input", "backward_weight")
"""The ops of a microbatch, the backward in halves."""
EXCHANGED_BYTES = 2 + 2
"""Per parameter and step: gradients are summed up and shared out, weights gathered, both in 16 bits."""


@dataclass
class Spread:
    """Costs of `options` with other degrees; `gpus` in all, `options.devices` and the like are replaced."""

    options: EstimateOptions
    gpus: int
    _counted: dict[tuple[int, int], dict[str, tuple[int, Counted]]] = field(default_factory=dict)

    def costs(self, pipeline: int, tensor: int, data: int, size: int) -> tuple[Profile, int, int, int]:
        """Return the profile of one pipeline, and in ns the tensor-parallel collectives of one microbatch, the exchange
        between replicas of one step, and what selective recompute of all layers adds to the collectives."""
        options = replace(
            self.options, devices=pipeline, tensor_parallel=tensor, data_parallel=data, microbatch_size=size
        )
        key = tensor, size
        if key not in self._counted:
            self._counted[key] = count_layers(options)
        counted = self._counted[key]
        return (
            estimate(options, counted),
            self._tensor_ns(counted, tensor, STEP),
            self._data_ns(counted, options),
            self._tensor_ns(counted, tensor, ("selective",)),
        )

    def _tensor_ns(self, counted: dict[str, tuple[int, Counted]], ranks: int, ops: tuple[str, ...]) -> int:
        from optpipe_torch.estimates.work import Work  # which imports torch: without it `count_layers` says so

        total = 0
        for count, layer in counted.values():
            for op in ops:
                collectives = [kernel for kernel in layer.work[op].kernels if kernel.kind == "collective"]
                total += count * work_ns(Work(collectives), self.options.gpu, ranks)
        return total

    def _data_ns(self, counted: dict[str, tuple[int, Counted]], options: EstimateOptions) -> int:
        """A ring over the replicas, at the network's bandwidth where they do not all lie in one node."""
        replicas, gpu = options.data_parallel, options.gpu
        if replicas == 1:
            return 0
        parameters = sum(count * layer.sizes.static for count, layer in counted.values()) // BYTES_PER_PARAMETER
        moved = EXCHANGED_BYTES * parameters / options.devices * (replicas - 1) / replicas
        inside = self.gpus <= gpu.devices_per_node
        bandwidth = gpu.collective_bytes_per_s if inside else gpu.network_bytes_per_s
        latency = gpu.peer_latency_ns if inside else gpu.network_latency_ns
        return round(2 * (replicas - 1) * latency + moved * 1e9 / (bandwidth * LINK_SHARE))
