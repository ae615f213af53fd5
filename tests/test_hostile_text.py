"""Strings of files are data: in what the terminal shows, in every export, and in the HTML page."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as ET

import msgspec
import pytest
from click.testing import CliRunner

from optpipe_compiler.cli import cli, main
from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.profile import Model
from optpipe_compiler.documents.units import printable
from optpipe_compiler.export import torchtitan
from optpipe_compiler.verify import check
from tests.instances import quick, uniform

HOSTILE = (
    'a[bold]b[/]\x1b[2J\x1b]0;t\x07\r\n\nfake: holds\u202e\u2066\u2028\x9b\x7f\U000e0041"""\'\\</script><b>{{js}}&'
)
ACTING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A schedule and its profile with hostile strings wherever a file has free text."""
    costs = uniform(2, 2)
    layers = [msgspec.structs.replace(layer, name=HOSTILE) for layer in costs.layers]
    machine = msgspec.structs.replace(costs.machine, kind=HOSTILE)
    model = Model(builder="gpt", config={HOSTILE: HOSTILE}, microbatch_size=1, sequence_length=1, dtype=HOSTILE)
    costs = msgspec.structs.replace(costs, name=HOSTILE, layers=layers, machine=machine, model=model)
    plan = quick(costs, 10**10, method="1f1b").schedule
    (tmp_path / "plain.json").write_text(ir.to_text(plan))
    some = next(iter(plan.forecast.baselines.values()))
    forecast = msgspec.structs.replace(
        plan.forecast,
        method=HOSTILE,
        bound=HOSTILE,
        baselines={HOSTILE: msgspec.structs.replace(some, fits=True, makespan_ns=1, peak_bytes=1, reason=HOSTILE)},
    )
    options = {**plan.provenance.options, HOSTILE: HOSTILE}
    provenance = msgspec.structs.replace(plan.provenance, compiler=HOSTILE, profile=HOSTILE, options=options)
    plan = ir.seal(msgspec.structs.replace(plan, forecast=forecast, provenance=provenance))
    (tmp_path / "schedule.json").write_text(ir.to_text(plan))
    (tmp_path / "profile.json").write_text(canonical(costs))
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMANDS = """
show schedule.json --width 100
verify schedule.json --profile profile.json
verify schedule.json --json
compare schedule.json
compare schedule.json --json
diff plain.json schedule.json
diff plain.json schedule.json --json
explain schedule.json --time-limit 0.1 --jobs 1
explain schedule.json --time-limit 0.1 --jobs 1 --json
compile profile.json --mem 10GB --method 1f1b -o other.json
report schedule.json
fmt schedule.json
sweep profile.json --mem 3GB:4GB:2 --time-limit 0.1 --jobs 1
bounds profile.json --mem 10GB
"""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("line", COMMANDS.strip().splitlines())
def test_no_character_of_a_file_acts_on_the_terminal(folder, monkeypatch, line, terminal):
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    done = CliRunner().invoke(cli, line.split())
    assert done.exit_code == 0, (done.output, done.exception)
    written = re.sub("\x1b\\[[0-9;?]*[A-Za-z]|\r", "", done.output) if terminal else done.output  # rich's own
    assert not ACTING.search(written)
    assert "\nfake: holds" not in written
    assert "\x1b[2J" not in done.output


def test_markup_of_a_file_is_shown_and_not_obeyed(folder):
    shown = CliRunner().invoke(cli, ["show", "schedule.json", "--width", "200"]).output
    assert "a[bold]b[/]\\u001b[2J\\u001b]0;t\\u0007\\u000d\\u000a" in shown.replace("\n", "").replace(" ", "")
    changed = CliRunner().invoke(cli, ["diff", "plain.json", "schedule.json", "--json"]).output
    assert HOSTILE in [change["new"] for change in json.loads(changed)["origin"]]


def test_an_error_is_one_line_whatever_the_file_holds(folder, monkeypatch, capsys):
    record = json.loads((folder / "schedule.json").read_text())
    record["forecast"]["outcome"] = HOSTILE
    (folder / "broken.json").write_text(json.dumps(record))
    (folder / f"{HOSTILE.replace('/', '')}.json").write_text("{}")
    for name in ("broken.json", f"{HOSTILE.replace('/', '')}.json"):
        monkeypatch.setattr("sys.argv", ["optpipe", "verify", name])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert not ACTING.search(said)


def test_the_page_shows_strings_as_text(folder):
    assert CliRunner().invoke(cli, ["report", "schedule.json"]).exit_code == 0
    page = (folder / "report.html").read_text()
    assert page.count("</script>") == page.count("<script") == 2
    assert "<b>{{js}}" not in page
    assert not ACTING.search(page)
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert printable(HOSTILE) in json.loads(data[1])["charts"][0]["title"]


@pytest.mark.parametrize("kind", ["svg", "chrome-trace", "torch-csv"])
def test_pictures_traces_and_tables_hold_strings_as_data(folder, kind):
    assert CliRunner().invoke(cli, ["export", "schedule.json", "--to", kind, "-o", "out"]).exit_code == 0
    content = (folder / "out").read_bytes()
    if kind == "svg":
        ET.fromstring(content)
    elif kind == "chrome-trace":
        assert json.loads(content)["otherData"]["method"] == HOSTILE
    elif kind == "torch-csv":
        assert re.fullmatch(rb"([0-9]+[FIWB][0-9]+[,\n])+", content)
    assert not ACTING.search(content.decode("latin-1"))


def test_a_sweeps_picture_and_sentences_hold_names_as_data(folder):
    assert CliRunner().invoke(cli, ["sweep", "profile.json", "--mem", "3GB", "--time-limit", "0.1"]).exit_code == 0
    record = json.loads((folder / "sweep.json").read_text())
    for point in record["points"]:
        point["method"] = HOSTILE
    (folder / "sweep.json").write_text(json.dumps(record))
    done = CliRunner().invoke(cli, ["sweep", "profile.json", "--mem", "3GB", "--time-limit", "0.1", "--svg", "s.svg"])
    assert done.exit_code == 0, done.exception
    assert "fake" in "".join(ET.fromstring((folder / "s.svg").read_text()).itertext())


@pytest.mark.parametrize(
    "text", [HOSTILE, '"""\nimport os\nos.system("touch called")\n"""', "\\", '"', '\\"""', "\\\n"]
)
def test_a_module_for_torchtitan_holds_strings_as_data(folder, text):
    plan = ir.load("plain.json")
    plan = msgspec.structs.replace(plan, provenance=msgspec.structs.replace(plan.provenance, compiler=text))
    tree = ast.parse(torchtitan.render(check(plan), None, f"{text}.csv", text))
    kinds = [type(node).__name__ for node in tree.body]
    assert kinds == ["Expr", "ImportFrom", "Assign", "Assign", "FunctionDef"]
    assert f"Written by {text} for" in ast.get_docstring(tree, clean=False).encode("utf-16", "surrogatepass").decode(
        "utf-16"
    )
    assert f"{text}.csv" in [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]


def test_every_unprintable_character_is_escaped_and_others_stay():
    text = "".join(map(chr, [*range(0x3000), *range(0xD7FE, 0xE002), 0xFEFF, 0xE0041, 0x1F600]))
    shown = printable(text)
    assert shown.isprintable()
    hidden = [letter for letter in text if not letter.isprintable()]
    assert [json.loads(f'"{printable(letter)}"') for letter in hidden] == hidden
    assert printable("plain ± é 漢 │ 😀") == "plain ± é 漢 │ 😀"
    assert printable("a\nb", keep="\n") == "a\nb"
