"""A sweep over GPUs: costs estimated for each, caps that a GPU does not have, which one is best, and resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from msgspec import structs

from optpipe_compiler.costs import gpus, models
from optpipe_compiler.errors import MissingDependency
from optpipe_compiler.model.placement import layout
from optpipe_compiler.model.problem import Caps, Freedom, build
from optpipe_compiler.study.frontier import BestGpu, answer, frontier
from optpipe_compiler.view import frontier_svg
from optpipe_compiler.view.sweep import device_sentences, gpu_sentences, memory_sentences, microbatch_sentences
from tests.test_cli import refused, run  # noqa: F401  (run is a fixture)
from tests.test_estimate_presets import LLAMA
from tests.test_sweep import GB, OPEN, SVG, here, point, sweep_of  # noqa: F401  (here is a fixture)

GRID = ("--devices", "2", "--microbatches", "3", "--seq", "64", "--time-limit", "0.1")
MEM = ("--mem", "1GB,3GB,90GB")
BOTH = ("--model", "tiny.json", "--gpu", "h200-sxm,a100-80gb")


def beyond(gb: float, gpu: str):
    return structs.replace(point(gb, None, gpu=gpu, bound=0), outcome="beyond memory", reason=f"{gpu} has less")


@pytest.fixture
def tiny(run):  # noqa: F811
    """Write the configuration of a small model; return the command."""
    Path("tiny.json").write_text(json.dumps(LLAMA))
    return run


@pytest.fixture
def torch_():
    pytest.importorskip("torch")


# -- points and answers -------------------------------------------------------------------------------------------


def test_nothing_crosses_from_one_gpu_to_another_nor_to_a_cap_that_the_gpu_does_not_have():
    found = frontier([point(1, 50, gpu="a"), beyond(9, "a"), point(1, 70, gpu="b"), point(9, 80, gpu="b")])
    assert [(p.gpu, p.makespan_ns, p.carried_from_bytes) for p in found] == [
        ("a", 50 * 10**6, None),
        ("a", None, None),
        ("b", 70 * 10**6, None),
        ("b", 70 * 10**6, GB),
    ]
    assert [p.outcome for p in found] == ["feasible", "beyond memory", "feasible", "feasible"]
    assert frontier(found) == found


def test_every_answer_is_per_gpu_and_leaves_out_caps_that_the_gpu_does_not_have():
    points = frontier(
        [
            point(1, 150, gpu="a"),
            point(4, 100, gpu="a"),
            point(4, 199, gpu="a", microbatches=20),
            point(4, 60, gpu="a", devices=4),
            beyond(8, "a"),
            point(4, 101, gpu="b"),
            point(8, 100, gpu="b"),
        ]
    )
    found = answer(points, 0.02)
    assert list(memory_sentences(found.cheapest_memory, 0.02)) == [
        "With 2 devices of a and 10 microbatches all caps tried below 4.00 GB lose 2% or more" + OPEN,
        "With 2 devices of b and 10 microbatches 4.00 GB is the cheapest cap tried that loses less than 2% against "
        "8.00 GB (1.0%; by the bounds at most 99.0%)" + OPEN,
    ]
    assert list(microbatch_sentences(found.enough_microbatches, 0.02)) == [
        "With 2 devices of a under 4.00 GB 10 microbatches are enough: 20 would give 0.5% more, by the "
        "bounds at most 19900.0%" + OPEN
    ]
    assert list(device_sentences(found.best_devices, None)) == [
        "Under 4.00 GB 2 devices of a have the most throughput per device: 50.25 microbatches/s, against 41.67 with 4"
        + OPEN
    ]


def test_the_best_gpu_is_that_of_the_best_point_and_may_differ_per_device():
    points = frontier(
        [
            point(1, 110, gpu="a", devices=2),
            point(4, 100, gpu="a", devices=2),
            point(8, 100, gpu="a", devices=2),
            point(8, 60, gpu="b", devices=4),
            point(8, None, gpu="c"),
        ]
    )
    together, each = answer(points, 0.02).best_gpus
    most = pytest.approx(10 / 0.06)
    assert together == BestGpu("b", False, most, 4, 10, 8 * GB, (("a", pytest.approx(100)), ("c", 0.0)))
    assert each == BestGpu(
        "a", True, pytest.approx(50), 2, 10, 4 * GB, (("b", pytest.approx(10 / 0.06 / 4)), ("c", 0.0))
    )
    assert list(gpu_sentences([together, each], None)) == [
        "b has the most throughput: 166.7 microbatches/s (4 devices, 10 microbatches, 8.00 GB), against 100 with a, "
        "0 with c" + OPEN,
        "a has the most throughput per device: 50 microbatches/s (2 devices, 10 microbatches, 4.00 GB), against 41.67 "
        "with b, 0 with c" + OPEN,
    ]


@pytest.mark.parametrize("points", [[], [point(1, 10)], [point(1, 10, gpu="a")], [point(1, None, gpu=g) for g in "ab"]])
def test_there_is_no_best_gpu_without_a_choice_or_without_a_schedule(points):
    assert answer(points, 0.02).best_gpus == []


def test_the_picture_has_a_line_per_gpu_and_room_for_any_name():
    name = "<a> & a very long name of a GPU that somebody wrote"
    drawn = sweep_of(point(1, 90, gpu=name), point(2, 80, gpu=name), point(2, 70, gpu="b"), beyond(9, "b"))
    root = ElementTree.fromstring(frontier_svg.render(drawn))
    assert len(root.findall(f"{SVG}polyline")) == 4
    texts = {text.text: text for text in root.iter(f"{SVG}text")}
    label = texts[f"2 devices of {name}, 10 microbatches"]
    assert float(label.get("x")) + 5 * len(label.text) < float(root.get("viewBox").split()[2])
    assert any("or more than the GPU has" in text for text in texts)


# -- runs ---------------------------------------------------------------------------------------------------------


def test_a_sweep_over_gpus_has_a_point_for_each_and_does_not_plan_caps_that_a_gpu_does_not_have(tiny, here, torch_):  # noqa: F811
    outcome = tiny("sweep", *BOTH, *MEM, *GRID, "--svg", "sweep.svg")
    assert outcome.code == 0, outcome.err
    assert "2 devices of a100-80gb, 3 microbatches, 90.00 GB: more than the GPU has" in outcome.err.splitlines()
    file = json.loads(Path("sweep.json").read_text())
    assert [(p["gpu"], p["mem_bytes"] // GB, p["makespan_ns"] is not None) for p in file["points"]] == [
        ("a100-80gb", 1, False),
        ("a100-80gb", 3, True),
        ("a100-80gb", 90, False),
        ("h200-sxm", 1, False),
        ("h200-sxm", 3, True),
        ("h200-sxm", 90, True),
    ]
    assert [p["outcome"] for p in file["points"]][:4] == [
        "infeasible",
        *(file["points"][1]["outcome"],),
        "beyond memory",
        "infeasible",
    ]
    assert file["points"][2]["reason"] == "a100-80gb has 80.00 GB, less than the cap of 90.00 GB"
    assert (file["profile"], file["profile_digest"], file["tokens_per_microbatch"]) == ("tiny", None, 64)
    assert set(file["gpu_profile_digests"]) == {"a100-80gb", "h200-sxm"}
    assert (file["options"]["sequence_length"], file["options"]["hidden"]) == (64, 64)
    said = " ".join(outcome.out.split())
    assert "h200-sxm has the most throughput: " in said
    assert "h200-sxm has the most throughput per device: " in said
    assert "All costs of tiny are estimated from data sheets, none is measured." in said
    assert len(ElementTree.parse("sweep.svg").getroot().findall(f"{SVG}polyline")) == 4


def test_a_sweep_over_gpus_is_continued_and_takes_further_gpus_and_devices(tiny, here, torch_):  # noqa: F811
    tiny("sweep", "--model", "tiny.json", "--gpu", "h200-sxm", *MEM, *GRID)
    here.clear()
    assert tiny("sweep", *BOTH, *MEM, *GRID).code == 0
    assert [one.gpu for one in here] == ["a100-80gb"] * 3
    here.clear()
    outcome = tiny("sweep", *BOTH, *MEM, *GRID, "--devices", "2,4", "--json")
    assert [(one.gpu, one.options.devices) for one in here] == [("h200-sxm", 4)] * 3 + [("a100-80gb", 4)] * 3
    report = json.loads(outcome.out)
    assert len(report["points"]) == 12
    assert [one["per_device"] for one in report["best_gpus"]] == [False, True]
    here.clear()
    tiny("sweep", *BOTH, *MEM, *GRID)
    assert here == []


def test_another_model_other_options_another_gpu_of_that_name_or_a_profile_are_refused(tiny, here, torch_):  # noqa: F811
    tiny("sweep", *BOTH, *MEM, *GRID)
    text = Path("sweep.json").read_text()
    again = "; name another file with -o, or delete this one"
    sentence = refused(tiny("sweep", *BOTH, *MEM, *GRID, "--tp", "2"), 2)
    assert sentence == "sweep.json: $.options.tensor_parallel is 1, expected 2" + again
    sentence = refused(tiny("sweep", *MEM), 2)
    assert sentence.startswith("sweep.json: is of tiny on GPUs, expected one of the profile ")
    other = json.loads(gpus.PRESETS.read_text())
    other["gpus"] = [{**next(g for g in other["gpus"] if g["name"] == "h200-sxm"), "memory_bytes": 10**11}]
    Path("mine.json").write_text(json.dumps(other))
    sentence = refused(tiny("sweep", "--model", "tiny.json", "--gpu", "mine.json", *MEM, *GRID), 2)
    assert sentence.startswith("sweep.json: $.gpu_profile_digests.h200-sxm is sha256:")
    Path("tiny.json").write_text(json.dumps({**LLAMA, "intermediate_size": 256}))
    sentence = refused(tiny("sweep", "--model", "tiny.json", "--gpu", "h100-sxm", *MEM, *GRID), 2)
    assert sentence == "sweep.json: $.options.ffn is 128, expected 256" + again
    assert Path("sweep.json").read_text() == text


def test_a_file_of_before_there_were_gpus_is_continued_but_not_with_gpus(tiny, here, torch_):  # noqa: F811
    grid = ("--mem", "0.1GB,2GB", "--microbatches", "3", "--time-limit", "0.1")
    tiny("sweep", *grid)
    old = json.loads(Path("sweep.json").read_text()) | {"revision": 0}
    del old["gpu_profile_digests"]
    for one in old["points"]:
        del one["gpu"]
    Path("sweep.json").write_text(json.dumps(old))
    here.clear()
    assert tiny("sweep", *grid).code == 0
    assert here == []
    sentence = refused(tiny("sweep", *BOTH, *MEM, *GRID), 2)
    assert sentence.endswith(", expected one of tiny on GPUs; name another file with -o, or delete this one")
    assert tiny("sweep", *grid, "--mem", "3GB").code == 0
    assert json.loads(Path("sweep.json").read_text())["revision"] == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("profile.json", *BOTH),
            "PROFILE is profile.json and --model is tiny.json, expected a profile or --model and --gpu",
        ),
        (("--gpu", "h200-sxm"), "--gpu is h200-sxm, which needs --model"),
        (("--seq", "64"), "--seq is 64, which needs --model"),
        (("--model", "tiny.json"), "--gpu is missing, expected one of a100-40gb, "),
        (("--model", "tiny.json", "--gpu", "h200-sxm,h300"), "--gpu is 'h300', expected one of a100-40gb, "),
        (("--model", "tiny.json", "--gpu", "b200,b200"), "--gpu is 'b200,b200', expected different GPUs"),
        (("--model", "llama-8", "--gpu", "b200"), "--model is 'llama-8', expected one of gpt2, "),
        ((*BOTH, "--tp", "3"), "--tp is 3, expected a divisor of the attention heads (4)"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence_before_any_work(tiny, here, arguments, sentence):  # noqa: F811
    assert refused(tiny("sweep", *MEM, *arguments), 2).startswith(sentence)
    assert here == []
    assert not Path("sweep.json").exists()


def test_more_devices_than_layers_are_refused(tiny, here, torch_):  # noqa: F811
    sentence = refused(tiny("sweep", *BOTH, *MEM), 2)
    assert sentence == "--devices is 8, expected at most the profile's 4 layers"


def test_without_torch_the_sentence_says_how_to_install_it(tiny, here, monkeypatch):  # noqa: F811
    monkeypatch.setattr("optpipe_torch.estimates.estimate.importlib.util.find_spec", lambda name: None)
    sentence = refused(tiny("sweep", *BOTH, *MEM, *GRID), MissingDependency.exit_code)
    assert sentence == "counting a model's layers needs torch: pip install 'optpipe[runtime]'"


@pytest.mark.parametrize(("links", "tp"), [("none", 1), ("pairs", 1), ("pairs", 2)])
def test_costs_estimated_for_more_devices_are_those_for_fewer(links, tp, torch_):
    from optpipe_torch.estimates.estimate import EstimateOptions, estimate

    model = replace(models.load("gpt2"), layers=20, heads=12)
    most = EstimateOptions(
        model=model,
        gpu=gpus.load("h100-sxm"),
        devices=22,
        sequence_length=64,
        shared_links=links,
        tensor_parallel=tp,
    )
    costs, caps = estimate(most), Caps(10**10, None)
    for devices in (1, 2, 3, 8, 9, 22):
        place = layout("linear", devices, 1, [1] * 22)
        exact = estimate(replace(most, devices=devices))
        assert build(costs, place, 4, caps, Freedom()) == build(exact, place, 4, caps, Freedom())
