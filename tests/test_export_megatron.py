"""The cut as Megatron-Core's layout, read by its own rules, and orders as tables of Primus, written and read."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedules import Shape, build, changed, random_shape

import optpipe
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.errors import BadInput
from optpipe_compiler.export import megatron, primus
from optpipe_compiler.export.ends import ends, unlike_blocks
from optpipe_compiler.verify import check
from tests.instances import quick, uniform
from tests.test_api import registry  # noqa: F401 - a fixture
from tests.test_cli import run  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from optpipe_compiler.documents.profile import Profile

ENDS = {"embedding_ms": (0.1, 0.0, 0.1), "head_ms": (0.1, 0.1, 0.1)}


def parsed(layout: str) -> list[str]:
    """The stages as `PipelineParallelLayerLayout.parse_str_to_list` of Megatron-Core reads them."""
    layout = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), layout)
    return layout.split("|")


def cut(ends: list[int], placement: list[int], embedding: bool, head: bool) -> ir.Schedule:
    """A schedule of which only the cut and the placement count."""
    plan = build(Shape((0, 1)))
    stage = plan.stages[0]
    stages = [
        msgspec.structs.replace(stage, stage=number, device=device, layers=(first, end))
        for number, (device, first, end) in enumerate(zip(placement, [0, *ends], ends, strict=False))
    ]
    setup = msgspec.structs.replace(plan.setup, devices=max(placement) + 1, layers=ends[-1])
    return msgspec.structs.replace(plan, setup=setup, stages=stages)


@given(st.lists(st.integers(1, 7), min_size=2, max_size=12), st.booleans(), st.booleans())
@settings(deadline=None)
def test_megatron_reads_back_the_layers_of_every_stage(sizes, embedding, head):
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    schedule = cut(ends, list(range(len(sizes))), embedding, head)
    stages = parsed(megatron.layout(schedule, embedding=embedding, head=head))
    assert len(stages) == len(sizes)
    found = "".join(stages)
    assert (found[0], found[-1]) == ("E", "L")
    assert set(found[1:-1]) <= {"t"}
    for number, (letters, size) in enumerate(zip(stages, sizes, strict=True)):
        own = size - (number == 0 and embedding) - (number == len(sizes) - 1 and head)
        assert letters.count("t") == own


def test_the_layout_is_short():
    schedule = cut([4, 8, 12, 16, 20, 22], list(range(6)), embedding=True, head=True)
    assert megatron.layout(schedule, embedding=True, head=True) == "Et*3|(t*4|)*4tL"


def test_the_command_prints_one_line_to_paste(run, tmp_path):  # noqa: F811
    costs = uniform(2, 3, **ENDS)
    (tmp_path / "profile.json").write_text(canonical(costs))
    (tmp_path / "plan.json").write_text(ir.to_text(quick(costs, 10**11, placement="loop", microbatches=4).schedule))
    arguments = ["export", "plan.json", "--to", "megatron-layout", "--profile", "profile.json"]
    done = run(*arguments)
    assert done.code == 0, done.err
    line = done.out.splitlines()[0]
    assert line.startswith("--num-layers 6 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout ")
    stages = parsed(re.search('"(.*)"', line)[1])
    assert ("".join(stages), len(stages) % 2) == ("EttttttL", 0)
    assert (tmp_path / "plan.megatron.txt").read_text() == line + "\n"
    assert "Megatron runs the cut in its own order" in done.err
    assert "taken for decoder layers" not in done.err
    assert "layers are taken for decoder layers: with --profile" in run(*arguments[:-2]).err


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: build(Shape((0, 1, 1, 0))), r"stages on the devices \[0, 1, 1, 0\]; expected a loop"),
        (lambda: build(Shape((0, 0, 1, 1))), "expected a loop"),
        (lambda: build(Shape((0, 1, 0, 1), microbatches=3)), "3 for 2; expected a multiple, or one stage per device"),
    ],
    ids=["v", "neighbours", "microbatches"],
)
def test_megatron_has_no_layout_for(schedule, message):
    with pytest.raises(BadInput, match=message):
        megatron.render(check(schedule()), None)


def named(*names: str, **changes: int) -> Profile:
    """A profile of blocks for two devices with these names; `changes` are of the first one."""
    costs = uniform(2, 1)
    layers = [msgspec.structs.replace(costs.layers[0], name=name, count=1) for name in names]
    return msgspec.structs.replace(costs, layers=[msgspec.structs.replace(layers[0], **changes), *layers[1:]])


@pytest.mark.parametrize("first", ["embedding", "wte", "tok_embeddings", "model.embed_tokens", "Embedding"])
@pytest.mark.parametrize(
    "last", ["head", "lm_head", "LMHead", "output", "output_layer", "logits", "unembed", "embed_out"]
)
def test_an_embedding_and_a_head_are_told_by_the_names_that_models_give_them(first, last):
    schedule = cut([2, 4], [0, 1], embedding=True, head=True)
    assert ends(schedule, named(first, "block", "block", last), "Megatron") == (True, True)
    assert ends(schedule, named("block", "block", "block", last), "Megatron") == (False, True)
    assert ends(schedule, named(first, "block", "block", "block"), "Megatron") == (True, False)


@pytest.mark.parametrize(
    ("costs", "taken"),
    [
        (named("table", "block", "block", "scores"), ["first layer table", "last layer scores"]),
        (named("l0", "l1", "l2", "l3", saved_bytes=0), ["first layer l0"]),
        (named("l0", "l1", "l2", "l10", forward_ns=7), []),
        (named("table"), []),
    ],
    ids=["names", "bytes", "times", "alone"],
)
def test_an_end_that_is_taken_for_a_block_is_told_where_it_is_unlike_its_neighbour(costs, taken):
    said = unlike_blocks(costs, embedding=False, head=False)
    assert [
        line.removeprefix("the ").partition(" is taken for a decoder layer, unlike its ")[0] for line in said
    ] == taken
    assert unlike_blocks(costs, embedding=True, head=True) == []


@pytest.mark.parametrize("kind", ["megatron-layout", "torchtitan"])
def test_the_command_says_which_end_is_taken_for_a_block(run, tmp_path, kind):  # noqa: F811
    costs = named("table", "block", "block", "logits")
    (tmp_path / "profile.json").write_text(canonical(costs))
    (tmp_path / "plan.json").write_text(ir.to_text(quick(costs, 10**11, method="1f1b").schedule))
    done = run("export", "plan.json", "--to", kind, "--profile", "profile.json")
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1].startswith(
        "optpipe: the first layer table is taken for a decoder layer, unlike its neighbour block: an embedding "
    )


def test_a_profile_with_parts_of_the_head_is_refused():
    costs = uniform(2, 2, **ENDS, head_parts=2)
    plan = check(quick(costs, 10**11, placement="linear", method="1f1b").schedule)
    for render, tool in ((megatron.render, "Megatron"), (primus.render, "Primus")):
        with pytest.raises(BadInput, match=f"{tool} has the embedding and the head whole"):
            render(plan, costs)


def test_primus_reads_the_data_in_the_order_of_forwards():
    plan = build(Shape((0, 1), microbatches=2))

    def change(plain):
        lane = plain["devices"][1]["compute"]
        first, second = (place for place, op in enumerate(plan.devices[1].compute) if op.name == "forward")
        lane[first], lane[second] = lane[second], lane[first]

    with pytest.raises(BadInput, match="stage 1 runs the forward of microbatch 1 where that of 0 is expected: Primus"):
        primus.render(ir.Checked(changed(plan, change)))


def test_primus_has_blocks_whole():
    halves = Model(builder="gpt", config={"granularity": "half"}, microbatch_size=1, sequence_length=1)
    plan = msgspec.structs.replace(build(Shape((0, 1), microbatches=2)), model=halves)
    with pytest.raises(BadInput, match="Primus has blocks whole"):
        primus.render(check(ir.seal(plan)))


# -- Primus


class FuncType(Enum):
    """As in Primus."""

    F = "FORWARD"
    B = "BACKWARD"
    W = "W_GRAD"
    BW = "BACKWARD_W_GRAD"
    SF = "SEND_FORWARD"
    SB = "SEND_BACKWARD"
    RF = "RECV_FORWARD"
    RB = "RECV_BACKWARD"


@dataclass
class SchedulerNode:
    """As in Primus."""

    func_type: FuncType
    mini_batch: int
    chunk: int
    args: Any = None

    def __str__(self):
        return f"({self.func_type.name}|{self.mini_batch}|{self.chunk})"


class PipelineScheduleAlgo:
    """As in Primus."""

    def __init__(self, pp_size, vpp_size, micro_batches):
        self.pp_size, self.vpp_size, self.micro_batches = pp_size, vpp_size, micro_batches


@pytest.fixture
def algorithms(monkeypatch):
    """Primus's names of algorithms, in modules that stand for its own."""
    scheduler = "primus.core.pipeline_parallel.scheduler"
    parts = scheduler.split(".")
    for name in (*(".".join(parts[: n + 1]) for n in range(4)), f"{scheduler}.algorithms"):
        package = ModuleType(name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    factory, base, node = (ModuleType(name) for name in ("schedule_table_factory", "base", "scheduler_node"))
    factory.pp_algorithm_map = {}
    base.PipelineScheduleAlgo = PipelineScheduleAlgo
    node.FuncType, node.SchedulerNode = FuncType, SchedulerNode
    sys.modules[scheduler].schedule_table_factory = factory
    monkeypatch.setitem(sys.modules, f"{scheduler}.schedule_table_factory", factory)
    monkeypatch.setitem(sys.modules, f"{scheduler}.algorithms.base", base)
    monkeypatch.setitem(sys.modules, f"{scheduler}.scheduler_node", node)
    return factory.pp_algorithm_map


PLACEMENTS = {"zero-bubble": (0, 1), "1f1b-interleaved": (0, 1, 0, 1), "zbv-formatted": (0, 1, 1, 0)}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "split"])
@pytest.mark.parametrize("algorithm", PLACEMENTS)
def test_primus_gets_the_order_with_a_partner_for_every_message(algorithms, algorithm, fused):
    placement = PLACEMENTS[algorithm]
    plan = build(Shape(placement, microbatches=4, fused=lambda *_: fused))
    exec(primus.render(check(plan)), {})
    made = algorithms[algorithm](2, len(placement) // 2, 4)
    table = made.generate_schedule_table()
    assert made.last_pp_stage_rank() == placement[-1]
    text = "\n".join(f"Rank {rank}: " + ",".join(map(str, row)) for rank, row in enumerate(table))
    compute = [[op.text for op in device.compute if op.name in primus.KIND_OF.values()] for device in plan.devices]
    assert primus.orders(text, list(placement)) == compute
    ends = {
        kind: [
            (node.args["from_pp_rank"], node.args["to_pp_rank"], node.mini_batch, node.chunk, *node.args.values())[:3]
            for row in table
            for node in row
            if node.func_type.name == kind
        ]
        for kind in ("SF", "RF", "SB", "RB")
    }
    assert len(ends["SF"]) == (len(placement) - 1) * 4
    assert sorted(ends["SF"]) == sorted(ends["RF"])
    assert sorted(ends["SB"]) == sorted(ends["RB"])
    with pytest.raises(ValueError, match="planned for"):
        algorithms[algorithm](4, 1, 4)


def posted(rank: int, nodes: list[SchedulerNode]) -> dict[int, list[tuple[str, int, int]]]:
    """By peer: kind, microbatch and chunk of the sender of a rank's messages, in the order in which
    `communication_handler.py` posts them under `async_p2p`: neighbouring messages of a time step together, for an even
    rank to the next, from the previous, to the previous, from the next, for an odd one from the previous first."""
    found = defaultdict(list)
    turns = ["SR", "RS", "SR", "RS"][rank % 2 :: 2]
    for _, batch in groupby(nodes, key=lambda node: node.args and node.args.get("time_step", 0)):
        messages = [node for node in batch if node.args and node.args["from_pp_rank"] != node.args["to_pp_rank"]]
        upwards = [node for node in messages if node.args["from_pp_rank"] < node.args["to_pp_rank"]]
        downwards = [node for node in messages if node not in upwards]
        for going, turn in zip((upwards, downwards), turns, strict=True):
            for node in sorted(going, key=lambda node: turn.index(node.func_type.name[0])):
                source, target = node.args["from_pp_rank"], node.args["to_pp_rank"]
                chunk = node.chunk if source == rank else node.args["recv_from_chunk"]
                found[target if source == rank else source].append((node.func_type.name[1], node.mini_batch, chunk))
    return found


@pytest.mark.parametrize("algorithm", PLACEMENTS)
def test_primus_is_told_what_to_run_the_table_with(algorithms, algorithm):
    names: dict[str, Any] = {}
    exec(primus.render(check(build(Shape(PLACEMENTS[algorithm])))), names)
    stages = "Ett|tt|tt|ttL" if len(PLACEMENTS[algorithm]) == 4 else "Ett|ttL"
    for line in (
        "patch_primus_pipeline: true",
        f"pp_algorithm: {algorithm} ",
        f"num_layers: {2 * len(PLACEMENTS[algorithm])}  # all: export with --profile",
        "pipeline_model_parallel_size: 2",
        f'pipeline_model_parallel_layout: "{stages}"',
    ):
        assert f"\n    {line}" in names["__doc__"]


def test_primus_hands_a_v_options_that_the_table_has_not(algorithms):
    exec(primus.render(check(build(Shape((0, 1, 1, 0), microbatches=4)))), {})
    v = algorithms["zbv-formatted"]
    assert v(2, 2, 4, combined_forward_backward=False, offload=False).generate_schedule_table()
    for option in ("combined_forward_backward", "offload"):
        with pytest.raises(ValueError, match="neither offload nor overlap"):
            v(2, 2, 4, **{option: True})


def test_virtual_stages_take_a_pipeline():
    plan = check(build(Shape((0, 0))))
    with pytest.raises(BadInput, match="Megatron has no virtual stages on 1 device, the schedule has 2"):
        megatron.render(plan, None)
    with pytest.raises(BadInput, match="Primus has no virtual stages on 1 device, the schedule has 2"):
        primus.render(plan)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("algorithm", "placement"),
    [("zero-bubble", (0, 1, 2)), ("1f1b-interleaved", (0, 1, 2, 0, 1, 2)), ("zbv-formatted", (0, 1, 2, 2, 1, 0))],
)
def test_both_ranks_of_a_pair_post_its_messages_in_one_order(algorithms, algorithm, placement, seed):
    plan = build(random_shape(Random(seed), placements=[placement], microbatches=5), seed)
    exec(primus.render(check(plan)), {})
    table = algorithms[algorithm](3, len(placement) // 3, 5).generate_schedule_table()
    orders = [posted(rank, nodes) for rank, nodes in enumerate(table)]
    assert any(orders)
    for rank, order in enumerate(orders):
        for peer, messages in order.items():
            assert orders[peer][rank] == messages


ZERO_BUBBLE = """
[rank 0] ]Rank 0: (F|0|0),(SF|0|0),(F|1|0),(SF|1|0),(RB|0|0),(B|0|0),(W|0|0),(RB|1|0),(B|1|0),(W|1|0)
[rank 0] ]Rank 1: (RF|0|0),(F|0|0),(B|0|0),(SB|0|0),(RF|1|0),(W|0|0),(F|1|0),(B|1|0),(SB|1|0),(W|1|0)
"""


def test_a_table_that_primus_printed_is_a_schedule_of_ones_own(registry):  # noqa: F811
    assert primus.orders(ZERO_BUBBLE, [0, 1])[1] == ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]

    @optpipe.schedule("from-primus")
    def order(problem):
        return optpipe.primus_order(ZERO_BUBBLE, problem)

    plan = optpipe.compile(uniform(2, 1), mem="100GB", microbatches=2, method="from-primus")
    assert [op.text for op in plan.checked.schedule.devices[1].compute if op.name in primus.KIND_OF.values()] == (
        ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]
    )


def test_a_table_is_read_as_primus_logs_it():
    """As its logger colours a terminal's lines, and with blanks."""
    logged = re.sub(
        r"\[rank 0\] \](.*)",
        "[\x1b[32m20260101 00:00:00\x1b[0m][\x1b[36mrank-0/2\x1b[0m]\x1b[1m[INFO]     \x1b[0m"
        "\x1b[1m[----------------base.py:44] : ]\x1b[33m\\1\x1b[0m\r",
        ZERO_BUBBLE,
    )
    assert logged.count("\x1b[33mRank") == 2
    for text in (logged, ZERO_BUBBLE.replace("),(", "), (")):
        assert primus.size(text) == (2, 2)
        assert primus.orders(text, [0, 1]) == primus.orders(ZERO_BUBBLE, [0, 1])


def test_a_table_of_primus_is_no_schedule_for_other_ranks_and_microbatches(registry):  # noqa: F811
    @optpipe.schedule("from-primus")
    def order(problem):
        return optpipe.primus_order(ZERO_BUBBLE, problem)

    profile = uniform(2, 1)
    found = optpipe.sweep(profile, ["100GB"], microbatches=[2, 3], time_limit=0.1)
    assert [point.microbatches for point in found.points] == [2, 3]
    plan = optpipe.compile(profile, mem="100GB", microbatches=3, time_limit=0)
    assert [row.fits for row in plan.baselines if row.name == "from-primus"] == [False]
    with pytest.raises(optpipe.BadInput, match="the table has 2 ranks and 2 microbatches, not 2 and 3"):
        optpipe.compile(profile, mem="100GB", microbatches=3, method="from-primus")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Rank 0: (F|0|0)", "1 lines such as 'Rank 0: .*', expected 2"),
        ("Rank 0: (F|0|0)\nRank 2: (F|0|0)", "rank 2 , expected 0 to 1"),
        ("Rank 0: (F|0|0)\nRank 0: (F|0|0)", "rank 0 twice"),
        ("Rank 0: (F|0|1)\nRank 1: (F|0|0)", "chunk 1 on rank 0, expected 0 to 0"),
        ("Rank 0: F0\nRank 1: (F|0|0)", "'F0' on rank 0, expected nodes such as"),
        ("Rank 0: (F|0|0)\nRank 1: (F|0|0),(BW|0", r"'\(BW\|0' on rank 1, expected nodes such as"),
        ("Rank 0: (X|0|0)\nRank 1: (F|0|0)", r"\(X\|0\|0\) on rank 0, expected F, B, W and BW"),
        (
            "Rank 0: (F|1|0),\x1b[32m[(F|2|0),(SF|2|0),(B|0|0)]\x1b[33m,(W|0|0)\nRank 1: (F|0|0)",
            "forwards and backwards in one, in .*, on rank 0, expected each by itself",
        ),
        ("Rank 0: (O|0|0)\nRank 1: (F|0|0)", r"\(O\|0\|0\) on rank 0, expected F, B, W and BW"),
    ],
)
def test_what_is_no_table_is_refused(text, message):
    with pytest.raises(BadInput, match=message):
        primus.orders(text, [0, 1])
