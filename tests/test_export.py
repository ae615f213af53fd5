"""optpipe export as a person meets it: names of files, refusals, and what is said of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from msgspec import structs
from small_schedules import Shape, build, changed

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.units import short_bytes
from optpipe_compiler.errors import BadInput
from optpipe_compiler.export import megatron, primus, torch_csv, torchtitan
from optpipe_compiler.export.whole import memory_ops, without_memory_ops
from optpipe_compiler.verify import check
from optpipe_compiler.verify.peaks import peaks
from tests import test_cli
from tests.instances import quick, uniform

run, refused = test_cli.run, test_cli.refused
GB = 10**9
COSTS = uniform(2, 2, d2h_ms=0.2, h2d_ms=0.2)
RENDERS = {
    "torch-csv": torch_csv.render,
    "torchtitan": lambda checked: torchtitan.render(checked, None, "plan.csv", "plan"),
    "primus": primus.render,
}


@pytest.fixture(scope="module")
def texts():
    """Schedules by name: `kept` without memory ops, `tight` with offloads."""
    kept = quick(COSTS, 3 * GB, method="zb-h1").schedule
    tight = quick(COSTS, 1 * GB, method="po-h").schedule
    assert not memory_ops(kept)
    assert memory_ops(tight)
    return {"kept": ir.to_text(kept), "tight": ir.to_text(tight)}


@pytest.fixture
def export(run, texts):
    """Run the command where both schedules are."""
    for name, text in texts.items():
        Path(f"{name}.json").write_text(text)
    return lambda *arguments: run("export", *arguments)


def said_of_peaks(err: str) -> str:
    """What is said beside what the layers are taken for."""
    return "".join(line for line in err.splitlines(keepends=True) if "taken for decoder layers" not in line)


def written() -> set[str]:
    return {path.name for path in Path().iterdir()} - {"profile.json", "kept.json", "tight.json"}


@pytest.mark.parametrize(
    ("kind", "names", "said"),
    [
        ("chrome-trace", {"kept.trace.json"}, ""),
        ("torch-csv", {"kept.csv"}, ""),
        ("torchtitan", {"kept.csv", "kept_torchtitan.py"}, "optpipe: all 4 layers are taken for decoder layers: "),
        ("primus", {"kept_primus.py"}, "optpipe: all 4 layers are taken for decoder layers: "),
        ("svg", {"kept.svg"}, ""),
    ],
)
def test_files_are_named_after_the_schedule(export, kind, names, said):
    outcome = export("kept.json", "--to", kind)
    assert (outcome.code, outcome.err[: len(said)], bool(outcome.err)) == (0, said, bool(said))
    assert written() == names
    for name in names:
        assert f"wrote {name}\n" in outcome.out


def test_every_file_is_what_its_name_says(export):
    for kind in ("chrome-trace", "torch-csv", "svg"):
        assert export("kept.json", "--to", kind).code == 0
    assert json.loads(Path("kept.trace.json").read_text())["traceEvents"]
    assert Path("kept.csv").read_text() == torch_csv.render(check(ir.load("kept.json")))
    assert Path("kept.svg").read_text().startswith("<svg ")


def test_the_schedule_in_the_directory_is_the_default_and_o_names_the_file(export):
    Path("schedule.json").write_text(Path("kept.json").read_text())
    assert export("--to", "torch-csv", "-o", "order.txt").code == 0
    assert Path("order.txt").read_text() == torch_csv.render(check(ir.load("kept.json")))


def test_what_python_imports_gets_a_name_that_python_can_import(export):
    Path("my-plan.v2.json").write_text(Path("kept.json").read_text())
    assert export("my-plan.v2.json", "--to", "torchtitan").code == 0
    assert {"my_plan_v2_torchtitan.py", "my_plan_v2.csv"} <= written()
    assert "my_plan_v2_torchtitan import with_schedule" in Path("my_plan_v2_torchtitan.py").read_text()


def test_torchtitan_takes_names_of_layers_from_the_profile(export):
    Path("costs.json").write_text(canonical(COSTS))
    assert export("kept.json", "--to", "torchtitan", "--profile", "costs.json", "-o", "here.py").code == 0
    assert "costs are not planned" in Path("here.py").read_text()
    assert "here.csv" in written()


@pytest.mark.parametrize(
    ("kind", "what"), [("torch-csv", "torch's CSV"), ("torchtitan", "torch's CSV"), ("primus", "Primus's table")]
)
def test_memory_ops_are_not_lost_unless_asked_for(export, kind, what):
    lost = memory_ops(ir.load("tight.json"))
    sentence = refused(export("tight.json", "--to", kind), 2)
    assert sentence.startswith(
        f"tight.json: has {lost['offload']} offloads and {lost['reload']} reloads, which {what} "
    )
    assert "--drop-memory-ops" in sentence
    assert written() == set()


def test_one_memory_op_that_would_be_lost_is_counted_in_the_singular(export, monkeypatch):
    lost = {"recompute": 1, "offload": 2}
    monkeypatch.setattr("optpipe_compiler.export.whole.memory_ops", lambda _: lost)
    sentence = refused(export("tight.json", "--to", "torch-csv"), 2)
    assert sentence.startswith("tight.json: has 2 offloads and 1 recompute, which torch's CSV cannot carry")
    lost["reload"] = 3
    sentence = refused(export("tight.json", "--to", "torch-csv"), 2)
    assert sentence.startswith("tight.json: has 2 offloads, 1 recompute and 3 reloads, which torch's CSV cannot carry")


UNITS = "cut.json: $.setup.units has "


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        (((0, 3, 8),), "2 slices per microbatch, which {} cannot carry; expected a schedule of whole microbatches"),
        (((0, 8), (0, 3)), "microbatches of 3 to 8 tokens, which {} cannot carry; expected microbatches of one length"),
    ],
    ids=["slices", "lengths"],
)
@pytest.mark.parametrize(
    ("kind", "what"), [("torch-csv", "torch's CSV"), ("torchtitan", "torch's CSV"), ("primus", "Primus's table")]
)
def test_microbatches_that_the_format_cannot_tell_apart_are_refused(export, kind, what, cuts, said):
    cut = build(Shape(tokens=8, cuts=cuts, ranges=lambda stage, unit: [("offload", 2 * stage, 2 * stage + 2)]))
    Path("cut.json").write_text(ir.to_text(cut))
    assert refused(export("cut.json", "--to", kind, "--drop-memory-ops"), 2).startswith(UNITS + said.format(what))
    assert written() == {"cut.json"}
    with pytest.raises(BadInput, match=r"^the schedule: \$\.setup\.units has"):
        RENDERS[kind](check(cut))


def test_a_cut_for_megatron_says_that_its_microbatches_are_whole(export):
    Path("cut.json").write_text(ir.to_text(build(Shape(tokens=8, cuts=((0, 3, 8),)))))
    outcome = export("cut.json", "--to", "megatron-layout")
    assert outcome.code == 0
    assert "Megatron runs the cut in its own order, without waits, memory ops and slices: other peaks" in outcome.err


def test_a_cut_for_megatron_says_that_lengths_and_selective_recompute_stay_behind(export):
    plan = build(Shape(tokens=8, cuts=((0, 8), (0, 3))))
    stages = [structs.replace(stage, selective=list(range(*stage.layers))) for stage in plan.stages]
    Path("cut.json").write_text(ir.to_text(ir.seal(structs.replace(plan, stages=stages))))
    outcome = export("cut.json", "--to", "megatron-layout")
    assert outcome.code == 0, outcome.err
    said = "without waits, memory ops, unequal lengths of microbatches and selective recompute: other peaks"
    assert said in outcome.err


@pytest.mark.parametrize("kind", ["torch-csv", "primus"])
@pytest.mark.parametrize(("length", "said"), [(3, "of 3 tokens, which the file does not say\n"), (8, "")])
def test_one_length_of_all_microbatches_is_said_where_it_is_not_the_profiles(export, kind, length, said):
    Path("even.json").write_text(ir.to_text(build(Shape(tokens=8, cuts=((0, length),)))))
    outcome = export("even.json", "--to", kind)
    assert (outcome.code, outcome.out.count("fits")) == (0, 2)
    assert said_of_peaks(outcome.err) == (said and f"optpipe: these are peaks of microbatches {said}")


@pytest.mark.parametrize(
    ("kind", "tool", "left"),
    [("torch-csv", "torch", torch_csv.as_torch_runs_it), ("primus", "Primus", without_memory_ops)],
)
def test_dropping_memory_ops_says_the_peak_that_results_against_the_cap(export, kind, tool, left):
    outcome = export("tight.json", "--to", kind, "--drop-memory-ops")
    assert outcome.code == 0
    assert f"peak in {tool}" in outcome.out
    schedule = ir.load("tight.json")
    found = peaks(left(check(schedule)))
    assert max(found) > schedule.setup.cap_bytes
    table = [line.split() for line in outcome.out.splitlines() if line.split()[0] in ("0", "1")]
    assert [row[:7] for row in table] == [
        [str(device.device), f"{device.peak_bytes / GB:.2f}", "GB", f"{peak / GB:.2f}", "GB", "1.00", "GB"]
        for device, peak in zip(schedule.devices, found, strict=True)
    ]
    verdicts = [f"{short_bytes(peak - GB)} over" if peak > GB else "fits" for peak in found]
    assert [" ".join(row[7:]) for row in table] == verdicts
    said = "optpipe: without its waits and memory ops the schedule does not fit the cap\n"
    assert said_of_peaks(outcome.err) == said


@pytest.mark.parametrize("kind", ["torch-csv", "primus"])
def test_a_schedule_without_memory_ops_fits(export, kind):
    outcome = export("kept.json", "--to", kind)
    assert outcome.out.count("fits") == 2
    assert said_of_peaks(outcome.err) == ""


def test_json_has_the_receive_buffers_that_the_text_names(export):
    outcome = export("kept.json", "--to", "torch-csv", "--json")
    buffers = json.loads(outcome.out)["torch_receive_buffer_bytes"]
    assert buffers == torch_csv.receive_buffers(ir.load("kept.json"))
    assert "torch_receive_buffer_bytes" not in json.loads(export("kept.json", "--to", "primus", "--json").out)


def test_what_is_piped_in_gives_the_output_no_name(export):
    """It was to be written beside /dev/stdin."""
    text = Path("kept.json").read_text()
    command = [sys.executable, "-m", "optpipe_compiler.cli", "export", "/dev/stdin", "--to", "svg"]
    where = {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, input=text, capture_output=True, text=True, env=where)
    sentence = "optpipe: /dev/stdin: is no name that the output could be named after, expected one: -o FILE\n"
    assert (done.returncode, done.stderr) == (2, sentence)
    done = subprocess.run([*command, "-o", "piped.svg"], input=text, capture_output=True, text=True, env=where)
    assert done.returncode == 0
    assert Path("piped.svg").exists()


def on_stdout(kind: str, stdout: IO[bytes] | int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "optpipe_compiler.cli", "export", "kept.json", "--to", kind, "-o", "/dev/stdout"]
    where = {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=where, check=True)


def test_a_file_on_stdout_is_alone_there(export):
    done = on_stdout("torch-csv", subprocess.PIPE)
    assert done.stdout == torch_csv.render(check(ir.load("kept.json")))
    assert "wrote /dev/stdout" in done.stderr
    assert "fits" in done.stderr
    assert (
        on_stdout("megatron-layout", subprocess.PIPE).stdout
        == megatron.render(check(ir.load("kept.json")), None) + "\n"
    )


def test_a_file_on_stdout_leaves_what_is_there_before_it(export):
    for mode in ("wb", "ab"):
        with Path("all.txt").open(mode) as file:
            file.write(b"before\n")
            file.flush()
            on_stdout("torch-csv", file)
            file.write(b"behind\n")
    written = f"before\n{torch_csv.render(check(ir.load('kept.json')))}behind\n"
    assert Path("all.txt").read_text() == 2 * written


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("none.json", "--to", "svg"), "none.json: cannot be read: No such file or directory"),
        (("profile.json", "--to", "svg"), 'profile.json: $.format is "optpipe-profile", expected "optpipe-schedule"'),
        (("kept.json", "--to", "svg", "-o", "no/a.svg"), "no/a.svg: cannot be written: No such file or directory"),
        (("kept.json", "--to", "svg", "-o", "a.PNG"), "'a.PNG' is a PNG, expected an .svg, which browsers show"),
        (("kept.json", "--to", "torchtitan", "-o", "a.toml"), "-o is 'a.toml', expected a Python file; "),
        *(
            (
                ("kept.json", "--to", kind, "--profile", "profile.json"),
                "profile.json: is not the profile that kept.json was compiled from: its digest is sha256:",
            )
            for kind in ("torch-csv", "torchtitan", "megatron-layout", "primus")
        ),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(export, arguments, sentence):
    assert refused(export(*arguments), 2).startswith(sentence)
    assert written() == set()


def test_what_verify_rejects_is_not_exported(export):
    broken = changed(ir.load("kept.json"), lambda plain: plain["devices"][0].update(peak_bytes=1))
    Path("broken.json").write_text(ir.to_text(broken))
    assert refused(export("broken.json", "--to", "chrome-trace"), 1).startswith(
        "broken.json: not exported, verify rejects it: "
    )
    assert written() == {"broken.json"}


def test_an_unknown_format_is_refused(export):
    outcome = export("kept.json", "--to", "pdf")
    assert outcome.code == 2
    assert "'pdf' is not one of" in outcome.err
