"""Names of ops: ids and their text form are two spellings of one thing."""

from __future__ import annotations

import pytest
from small_schedules import Shape, build

from optpipe_compiler.documents.ops import LETTERS, MESSAGES, OpName, op_id, parse, range_name
from optpipe_compiler.errors import BadInput

TABLE = [
    ("forward:0:0", "0F0", OpName("forward", 0, 0)),
    ("backward_input:2:13", "2I13", OpName("backward_input", 2, 13)),
    ("backward_weight:2:13", "2W13", OpName("backward_weight", 2, 13)),
    ("backward:10:1", "10B1", OpName("backward", 10, 1)),
    ("recompute:1:0:3-5", "1R0:3-5", OpName("recompute", 1, 0, (3, 5))),
    ("offload:1:0:0-1", "1D0:0-1", OpName("offload", 1, 0, (0, 1))),
    ("reload:1:0:0-1", "1H0:0-1", OpName("reload", 1, 0, (0, 1))),
    ("forward:2:0.1", "2F0.1", OpName("forward", 2, 0, None, 1)),
    ("offload:1:10.0:0-1", "1D10.0:0-1", OpName("offload", 1, 10, (0, 1), 0)),
    ("send_gradient:1:4.12", ">1I4.12", OpName("send_gradient", 1, 4, None, 12)),
    ("send_activation:0:4", ">0F4", OpName("send_activation", 0, 4)),
    ("recv_activation:1:4", "<1F4", OpName("recv_activation", 1, 4)),
    ("send_gradient:1:4", ">1I4", OpName("send_gradient", 1, 4)),
    ("recv_gradient:0:4", "<0I4", OpName("recv_gradient", 0, 4)),
]


@pytest.mark.parametrize(("known", "text", "name"), TABLE, ids=[text for _, text, _ in TABLE])
def test_both_forms_are_made_and_parsed(known, text, name):
    assert (name.id, name.text, op_id(*name)) == (known, text, known)
    assert parse(known) == parse(text) == name


def test_the_table_has_every_kind():
    assert {name.kind for _, _, name in TABLE} == set(LETTERS) | set(MESSAGES)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "forward",
        "forward:0",
        "forward:-1:0",
        "forward:0:00",
        "forward:0:0:0-1",
        "offload:0:0",
        "idle:0:0",
        "F0",
        "0f0",
        "0X0",
        ">0B0",
        "0D0",
        "0F0:1-2",
        " 0F0",
        "0F0\n",
        "0F0.",
        "0F.1",
        "0F0.01",
        "forward:0:0.1.2",
        "0F\u0660",
    ],
)
def test_what_is_no_op_is_refused(name):
    with pytest.raises(BadInput, match="is no op, expected one such as"):
        parse(name)


def test_ops_of_a_schedule_have_these_names():
    schedule = build(Shape((0, 1), ranges=lambda stage, microbatch: [("offload", 0, 1)] if microbatch == 0 else []))
    ops = [op for device in schedule.devices for op in (*device.compute, *device.d2h, *device.h2d)]
    assert ops[0].id == "forward:0:0"
    assert ops[0].text == "0F0"
    assert {parse(op.text).id for op in ops} == {op.id for op in ops}
    assert len({op.text for op in ops}) == len(ops)


def test_profilers_see_words():
    assert range_name("forward", 3, 2) == "forward 3 m2"
    assert range_name("forward", 3, 2, 1) == "forward 3 m2.1"
