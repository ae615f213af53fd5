"""Schedule tables of Primus: one list of nodes `(F|microbatch|chunk)` per rank, as its `print_schedule_table` writes.

Primus (AMD-AGI/Primus, `primus/core/pipeline_parallel/scheduler`) makes its tables in Python classes and reads none
from a file. What is written is therefore a module with the table and a class that returns it, which takes the place of
one of Primus's algorithms, because its launcher knows no other names. Nodes: F, B (input gradient), W (weight
gradient), BW (both), and the messages SF, SB, RF, RB; a chunk is a stage of the rank, in model order. Primus's O and R
offload whole chunks to plans of its own and are not written.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from optpipe_compiler.documents.ops import OpName
from optpipe_compiler.documents.units import printable
from optpipe_compiler.errors import BadInput
from optpipe_compiler.export.ends import ends
from optpipe_compiler.export.megatron import layout, refuse_chunks_of_one_device
from optpipe_compiler.export.whole import refuse_units

if TYPE_CHECKING:
    from collections.abc import Iterator

    from optpipe_compiler.documents.ir import Checked, Op, Schedule
    from optpipe_compiler.documents.profile import Profile

KINDS = {
    "forward": "F",
    "backward_input": "B",
    "backward_weight": "W",
    "backward": "BW",
    "send_activation": "SF",
    "send_gradient": "SB",
    "recv_activation": "RF",
    "recv_gradient": "RB",
}
KIND_OF = {"F": "forward", "B": "backward_input", "W": "backward_weight", "BW": "backward"}
_MESSAGES = ("SF", "SB", "RF", "RB")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"Rank (\d+): *(.*)")
_NODE = re.compile(r"\(([A-Z]+)\|(\d+)\|(\d+)\)")

TEMPLATE = '''"""Schedule table for Primus. Written by {compiler} for the schedule
{digest}; ranks: {devices}, chunks per rank: {chunks}, microbatches per step: {microbatches}.

Import this module before training starts and run with

    patch_primus_pipeline: true
    pp_algorithm: {algorithm}  # whose place the table takes
    communication_method: async_p2p  # Primus's default; under batch_p2p ranks can wait for each other for ever
    num_layers: {layers}{told}
    pipeline_model_parallel_size: {devices}
    pipeline_model_parallel_layout: "{layout}"
"""

import re

from primus.core.pipeline_parallel.scheduler import schedule_table_factory
from primus.core.pipeline_parallel.scheduler.algorithms.base import PipelineScheduleAlgo
from primus.core.pipeline_parallel.scheduler.scheduler_node import FuncType, SchedulerNode

TABLE = """
{table}"""
PLACEMENT = {placement}  # the rank of every stage, in model order
PLANNED = ({devices}, {chunks}, {microbatches})


class PlannedSchedule(PipelineScheduleAlgo):
    """The planned order, for the ranks, chunks and microbatches that it was planned for."""

    def __init__(self, pp_size, vpp_size, micro_batches, combined_forward_backward=False, offload=False):
        super().__init__(pp_size, vpp_size, micro_batches)
        if combined_forward_backward or offload:
            raise ValueError("the table has neither offload nor overlap_moe_expert_parallel_comm")
        if (pp_size, vpp_size, micro_batches) != PLANNED:
            raise ValueError(f"planned for {{PLANNED}} ranks, chunks and microbatches")
        self.stages = [[s for s, rank in enumerate(PLACEMENT) if rank == own] for own in range(pp_size)]

    def last_pp_stage_rank(self):
        return PLACEMENT[-1]

    def direction_map(self, rank, chunk, func_type):
        """Where a stage's tensors come from and go to."""
        stage, step = self.stages[rank][chunk], 1 if func_type == FuncType.F else -1
        behind, ahead = stage - step, stage + step
        letter = "F" if func_type == FuncType.F else "B"
        return {{
            "prev": (self.rank(behind), FuncType["R" + letter]),
            "next": (self.rank(ahead), FuncType["S" + letter]),
            "recv_from_chunk": self.chunk(behind, chunk),
            "send_to_chunk": self.chunk(ahead, chunk),
        }}

    def rank(self, stage):
        return PLACEMENT[stage] if 0 <= stage < len(PLACEMENT) else None

    def chunk(self, stage, own):
        rank = self.rank(stage)
        return own if rank is None else self.stages[rank].index(stage)

    def generate_schedule_table(self):
        table = []
        for rank, line in enumerate(TABLE.split()):
            nodes = re.findall(r"\\((\\w+)\\|(\\d+)\\|(\\d+)\\)", line)
            table.append([self.node(rank, FuncType[kind], int(m), int(chunk)) for kind, m, chunk in nodes])
            self.keep_order(table[-1])
        return table

    def keep_order(self, nodes):
        """Both ranks of a pair post its messages in one order: Primus posts neighbours of one time step together, those
        to higher ranks first, which is another order after one to a lower rank."""
        step, lowered = 0, set()
        for node in nodes:
            if node.args is None:
                lowered = set()
                continue
            source, target = node.args["from_pp_rank"], node.args["to_pp_rank"]
            if (target, source) in lowered:
                step, lowered = step + 1, set()
            if source > target:
                lowered.add((source, target))
            node.args["time_step"] = step

    def node(self, rank, kind, microbatch, chunk):
        args = None
        if kind.name in ("SF", "SB", "RF", "RB"):
            found = self.direction_map(rank, chunk, FuncType[kind.name[1]])
            if kind.name[0] == "S":
                args = {{"from_pp_rank": rank, "to_pp_rank": found["next"][0]}}
                args["send_to_chunk"] = found["send_to_chunk"]
            else:
                args = {{"from_pp_rank": found["prev"][0], "to_pp_rank": rank}}
                args["recv_from_chunk"] = found["recv_from_chunk"]
        return SchedulerNode(func_type=kind, mini_batch=microbatch, chunk=chunk, args=args)


schedule_table_factory.pp_algorithm_map["{algorithm}"] = PlannedSchedule
'''


def render(checked: Checked, profile: Profile | None = None) -> str:
    """Return the module; raise BadInput for what `refuse_units` refuses, and where no algorithm has the placement.

    Primus cuts Megatron's model into chunks: parts of an embedding or a head and halves of blocks are refused.
    """
    schedule = checked.schedule
    refuse_units(schedule, "the schedule", "Primus's table")
    refuse_chunks_of_one_device(schedule, "Primus")
    embedding, head = ends(schedule, profile, "Primus")
    algorithm = _algorithm(schedule)
    _refuse_other_orders(schedule)
    lines = table(schedule)
    return TEMPLATE.format(
        compiler=_in_docstring(schedule.provenance.compiler),
        digest=_in_docstring(schedule.digest),
        devices=schedule.setup.devices,
        chunks=len(schedule.stages) // schedule.setup.devices,
        microbatches=schedule.setup.microbatches,
        algorithm=algorithm,
        layers=schedule.setup.layers - embedding - head,
        told="" if embedding or head else "  # all: export with --profile if the ends are an embedding and a head",
        layout=layout(schedule, embedding=embedding, head=head),
        table="".join(line.partition(": ")[2] + "\n" for line in lines),
        placement=[stage.device for stage in schedule.stages],
    )


def table(schedule: Schedule) -> list[str]:
    """Return Primus's text of the compute ops and messages, a line for each rank."""
    chunks: dict[int, int] = {}
    seen: dict[int, int] = {}
    for stage in schedule.stages:
        chunks[stage.stage] = seen.get(stage.device, 0)
        seen[stage.device] = chunks[stage.stage] + 1
    return [
        f"Rank {device.device}: " + ",".join(node for op in device.compute for node in _nodes(op, chunks, schedule))
        for device in schedule.devices
    ]


def size(text: str) -> tuple[int, int]:
    """Return how many ranks and microbatches a table of such lines has."""
    lines = _lines(text)
    microbatches = {microbatch for _, nodes in lines for _, microbatch, _ in _NODE.findall(nodes)}
    return len({rank for rank, _ in lines}), len(microbatches)


def orders(text: str, placement: list[int]) -> list[list[str]]:
    """Return the compute ops of each rank, such as `2F0`, from lines `Rank 0: (F|0|0),...`; `placement` has the rank
    of every stage, in model order. Messages are left out; raises BadInput naming the rank and the node."""
    ranks = max(placement) + 1
    found: dict[int, list[str]] = {}
    for rank, nodes in _lines(text):
        mine = [stage for stage, owner in enumerate(placement) if owner == rank]
        if rank in found or not mine:
            raise BadInput(f"the table has rank {rank} " + ("twice" if mine else f", expected 0 to {ranks - 1}"))
        if left := _NODE.sub("", nodes).strip(", "):
            is_combined = set(left) <= set("[], ")
            raise BadInput(
                f"the table has forwards and backwards in one, in [], on rank {rank}, expected each by itself: print "
                "it without overlap_moe_expert_parallel_comm"
                if is_combined
                else f"the table has {left[:40]!r} on rank {rank}, expected nodes such as (F|0|0)"
            )
        found[rank] = []
        for kind, microbatch, chunk in _NODE.findall(nodes):
            if kind not in KIND_OF and kind not in _MESSAGES:
                raise BadInput(f"the table has ({kind}|{microbatch}|{chunk}) on rank {rank}, expected F, B, W and BW")
            if int(chunk) >= len(mine):
                raise BadInput(f"the table has chunk {chunk} on rank {rank}, expected 0 to {len(mine) - 1}")
            if kind in KIND_OF:
                found[rank].append(OpName(KIND_OF[kind], mine[int(chunk)], int(microbatch)).text)
    if len(found) != ranks:
        raise BadInput(f"the table has {len(found)} lines such as 'Rank 0: (F|0|0)', expected {ranks}")
    return [found[rank] for rank in range(ranks)]


def _lines(text: str) -> list[tuple[int, str]]:
    """Return rank and nodes of each line of a table, which Primus and its logger print in colours."""
    return [(int(rank), nodes.strip()) for rank, nodes in _LINE.findall(_COLOUR.sub("", text))]


def _nodes(op: Op, chunks: dict[int, int], schedule: Schedule) -> Iterator[str]:
    """Yield the op's node, and the rank's message to itself where the result stays, as at the turn of a V."""
    if op.name not in KINDS:
        return
    yield _node(KINDS[op.name], op.microbatch, chunks[op.stage])
    letter, step = ("F", 1) if op.name == "forward" else ("B", -1)
    other = op.stage + step
    produces = op.name in ("forward", "backward_input", "backward")
    stays = (
        produces
        and other in range(len(schedule.stages))
        and schedule.stages[other].device == schedule.stages[op.stage].device
    )
    if stays:
        yield _node(f"S{letter}", op.microbatch, chunks[op.stage])
        yield _node(f"R{letter}", op.microbatch, chunks[other])


def _node(kind: str, microbatch: int, chunk: int) -> str:
    return f"({kind}|{microbatch}|{chunk})"


def _algorithm(schedule: Schedule) -> str:
    """Return the algorithm of Primus whose placement is the schedule's."""
    devices, stages = schedule.setup.devices, len(schedule.stages)
    found = [stage.device for stage in schedule.stages]
    if found == [*range(devices)]:
        return "zero-bubble"
    if found == [*range(devices), *reversed(range(devices))]:
        return "zbv-formatted"
    if stages % devices == 0 and found == [stage % devices for stage in range(stages)]:
        return "1f1b-interleaved"
    raise BadInput(
        f"Primus cannot place the {stages} stages on the devices {found}; expected one stage per device, a loop, or a "
        "V of two stages per device (optpipe compile --placement)"
    )


def _refuse_other_orders(schedule: Schedule) -> None:
    """Raise BadInput where a stage does not run its microbatches in order: each of Primus's chunks reads the data as
    they come."""
    for device in schedule.devices:
        following = [0] * len(schedule.stages)
        for op in device.compute:
            if op.name == "forward":
                if op.microbatch != following[op.stage]:
                    raise BadInput(
                        f"stage {op.stage} runs the forward of microbatch {op.microbatch} where that of "
                        f"{following[op.stage]} is expected: Primus reads the data in the order of forwards"
                    )
                following[op.stage] += 1


def _in_docstring(text: str) -> str:
    return printable(text.replace("\\", "\\\\").replace('"', '\\"'))
