"""The rooms of docs/ARCHITECTURE.md: who may import whom, who prints, and which commands do without which package."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from optpipe_compiler.documents import ir
from optpipe_compiler.documents.files import canonical
from optpipe_compiler.documents.ops import LETTERS, MESSAGES
from optpipe_compiler.verify import verify
from tests.instances import quick, uniform

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parent.parent
PACKAGES = ("optpipe", "optpipe_compiler", "optpipe_torch", "runtime_torch")
TORCH = ("optpipe_torch", "runtime_torch")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
PAGE = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}


# -- imports as written -------------------------------------------------------------------------------------------


def imported(node: ast.AST) -> list[str]:
    """The modules that an import statement names; `from a import b` may name the module a.b."""
    if isinstance(node, ast.Import):
        return [name.name for name in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative import"
        return [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return []


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(body: list[ast.AST], *, lazy: bool) -> set[str]:
    """All modules imported at run time; without `lazy` only those imported as soon as the module is."""
    found: set[str] = set()
    for node in body:
        if is_for_types(node) or (not lazy and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        found.update(imported(node))
        found |= imports(list(ast.iter_child_nodes(node)), lazy=lazy)
    return found


def ours(module: str, *, lazy: bool = True) -> set[str]:
    """The modules of this project that `module` imports at run time, packages by their __init__."""
    return {name for name in imports(TREES[module].body, lazy=lazy) if name in TREES and name != module}


def theirs(module: str) -> set[str]:
    """The top names of everything else that `module` imports, also within functions and for types."""
    return {name.split(".")[0] for name in named(module)}


@functools.cache
def named(module: str) -> set[str]:
    """Everything that `module` imports, also within functions and for types."""
    return {name for node in ast.walk(TREES[module]) for name in imported(node)}


def inner(names: Iterable[str]) -> set[str]:
    """Our modules among them; of a package and its module the module."""
    modules = {name for name in names if name in TREES}
    return {name for name in modules if not any(other.startswith(name + ".") for other in modules)}


def within(room: str) -> list[str]:
    return [module for module in TREES if module == room or module.startswith(room + ".")]


# -- rooms --------------------------------------------------------------------------------------------------------

ROOMS = {
    "errors": "",
    "processes": "",
    "documents": "errors",
    "costs": "documents errors",
    "model": "documents errors",
    "machine": "errors model",
    "published": "documents errors machine model",
    "solver": "errors model processes",
    "plan": "documents errors machine model published solver",
    "lower": "documents machine model optpipe_compiler",
    "verify": "documents errors",
    "compiler": "costs documents errors forecast lower machine model plan verify",
    "cache": "compiler documents errors forecast published verify",
    "forecast": "documents errors",
    "diff": "documents",
    "export": "documents errors forecast",
    "study": "cache compiler documents errors forecast model processes published verify",
    "view": "compiler costs diff documents errors forecast study verify",
    "cli": (
        "cache compiler costs diff documents errors export forecast published study verify view optpipe_compiler "
        "emulate estimates launch models profiler"
    ),
    "optpipe": "cache compiler costs documents errors estimates export model published study verify view",
    "runtime_torch": "documents errors",
    "frameworks": "documents errors runtime_torch",
    "models": "costs documents errors frameworks optpipe_compiler optpipe_torch runtime_torch",
    "launch": "processes documents errors forecast models replan runtime_torch",
    "replan": "processes costs documents errors forecast runtime_torch study",
    "profiler": "processes costs documents errors launch models runtime_torch",
    "estimates": "costs documents errors models profiler runtime_torch",
    "emulate": "documents errors launch models profiler runtime_torch",
    "optpipe_compiler": "",
    "optpipe_torch": "",
}
"""Each room and the rooms whose modules it imports, also within functions and for types. The last two are the packages'
own __init__: they say where a package is, and its version."""


def room(module: str) -> str:
    """The folder or file below the package; the replay is one room, and a package's own __init__ bears its name."""
    package, _, rest = module.partition(".")
    return package if package in ("optpipe", "runtime_torch") or not rest else rest.split(".")[0]


@functools.cache
def arrows() -> dict[str, set[str]]:
    """For every room the other rooms that it imports from."""
    found: dict[str, set[str]] = {room(module): set() for module in TREES}
    for module in TREES:
        for node in ast.walk(TREES[module]):
            found[room(module)] |= {room(name) for name in inner(imported(node))} - {room(module)}
    return found


def test_rooms_of_two_packages_have_two_names():
    assert len({(module.split(".")[0], room(module)) for module in TREES}) == len(arrows())


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_exactly_the_rooms_that_the_table_says(name):
    assert arrows()[name] == set(ROOMS[name].split())


def test_the_table_has_every_room():
    assert set(ROOMS) == set(arrows())


def test_the_page_has_a_line_for_every_room():
    lines = re.findall(r"^- (`.+?`(?:, `.+?`)*): ", PAGE, flags=re.M)
    told = [name.strip("`/").removesuffix(".py") for line in lines for name in line.split(", ")]
    assert sorted([*told, "runtime_torch"]) == sorted(set(ROOMS) - {"optpipe_compiler", "optpipe_torch"})


@pytest.mark.parametrize("name", re.findall(r"`([\w/]+(?:/|\.(?:py|json|md)))`|\]\(([^)]+)\)", PAGE), ids="".join)
def test_what_the_page_names_exists(name):
    homes = (ROOT, ROOT / "docs", *(ROOT / package for package in PACKAGES))
    assert any((home / "".join(name)).exists() for home in homes)


def test_the_page_of_the_replay_has_a_line_for_every_file():
    listed = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "runtime_torch" / "README.md").read_text(), flags=re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "runtime_torch").glob("*.py"))


def test_no_two_rooms_need_each_other():
    TopologicalSorter({name: allowed.split() for name, allowed in ROOMS.items()}).prepare()  # raises for a circle


def test_only_the_solver_imports_ortools_only_the_machine_numba_and_not_the_compiler_torch():
    users = {name: {module for module in TREES if name in theirs(module)} for name in ("ortools", "numba", "torch")}
    assert users["ortools"]
    assert users["ortools"] <= set(within("optpipe_compiler.solver"))
    assert users["numba"] == {f"optpipe_compiler.machine.{name}" for name in ("compiled", "inlined", "views")}
    assert users["torch"]
    assert not users["torch"] & set(within("optpipe_compiler"))


PRIVATE = {
    "_assert_async",  # asked for with getattr: without it nothing is refused
    "_cdata",  # the address of a storage's record, as a key
    "_comm_hooks",  # asked for with getattr: without it nothing is refused
    "_raw_saved_",  # as the documentation of saved tensors writes them
    "_scaled_dot_product_flash_attention",  # names of ops, as torch.ops has them
    "_scaled_dot_product_flash_attention_backward",
    "_unsafe_view",
    "_python_dispatch",  # estimates count on the meta device
    "_pytree",
}
"""Names of torch with an underscore that are read outside of engine.py, which does without all of its own."""


def underscored(tree: ast.Module) -> set[str]:
    """The names with one underscore in front that a module reads, imports or has as a string."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update([*(node.module or "").split("."), *(name.name for name in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def defined(tree: ast.Module) -> set[str]:
    """The names that a module gives to something."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return found


def test_private_names_of_torch_are_read_where_their_absence_is_looked_after():
    users = [module for module in TREES if "torch" in theirs(module) and not module.endswith(".engine")]
    own = set().union(*(defined(TREES[module]) for module in users), {"_exit"})
    assert set().union(*(underscored(TREES[module]) for module in users)) - own == PRIVATE


def test_heavy_packages_are_imported_only_when_they_are_needed():
    for module in within("optpipe_compiler"):
        at_once = {name.split(".")[0] for name in imports(TREES[module].body, lazy=False)}
        assert not at_once & {"ortools", "torch", *TORCH}, module
        if module == "optpipe_compiler.machine" or module not in within("optpipe_compiler.machine"):
            assert not any(name.startswith("optpipe_compiler.machine.") for name in ours(module, lazy=False)), module


def test_no_module_imports_itself_by_a_detour():
    TopologicalSorter({module: inner(named(module)) - {module} for module in TREES}).prepare()  # also not for types


def test_only_the_judge_makes_a_checked_schedule():
    making = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Checked", "ir.Checked")
    }
    assert making == {"optpipe_compiler.verify"}


def test_the_judge_states_the_memory_table_again():
    assert all("optpipe_compiler.documents.memory" not in named(module) for module in within("optpipe_compiler.verify"))


def begins_as_an_id(node: ast.AST) -> bool:
    """Whether it is an f-string such as f"forward:{stage}:{microbatch}" or f"{stage}F{microbatch}"."""
    if not isinstance(node, ast.JoinedStr):
        return False
    text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    kinds = "|".join([*LETTERS, *MESSAGES])
    return re.match(rf"({kinds}):{{}}|{{}}:{{}}:{{}}(:|$)|{{}}[{''.join(LETTERS.values())}]{{}}", text) is not None


def test_ids_and_text_forms_of_ops_are_made_in_one_place():
    making = {module for module, tree in TREES.items() if any(begins_as_an_id(node) for node in ast.walk(tree))}
    assert making == {"optpipe_compiler.documents.ops"}


ALIKE = {
    "Carry": "what slices of a microbatch pass on: its bytes in the file, itself in the runtime",
    "Comparison": "of a study, and as the Python interface shows it",
    "DecoderLayer": "of transformers: cut out of its model, and by itself to run in slices",
    "Embedding": "the first layer, of transformers' models and of our own",
    "EmbeddingPart": "some rows of it, for any loop and in our own models",
    "Explanation": "of a study, and as the Python interface shows it",
    "Head": "the last layer, of transformers' models and of our own",
    "HeadPart": "some rows of it, for any loop and in our own models",
    "Host": "of a profile, and in the file",
    "Question": "what a study is asked",
    "Schedule": "as it is planned, and in the file",
    "Stage": "as it is planned, and in the file",
    "Sweep": "of a study, and as the Python interface shows it",
    "Table": "the memory table, for readers and for the judge",
}
"""Names of classes that stand in two modules, and the one thing that both are."""


def test_no_name_of_a_class_has_two_meanings():
    homes: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert {name for name, modules in homes.items() if len(modules) > 1} == set(ALIKE)
    assert all(len(homes[name]) == 2 for name in ALIKE)


def is_print(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in ("print", "Console", "secho", "echo")
    if isinstance(node.func, ast.Attribute):
        return node.func.attr in ("echo", "secho", "Console") or ast.unparse(node.func) in (
            "sys.stdout.write",
            "sys.stderr.write",
        )
    return False


def test_only_the_commands_and_the_view_print():
    printing = {module for module in TREES if any(is_print(node) for node in ast.walk(TREES[module]))}
    assert "optpipe_compiler.cli.compile" in printing
    under_torchrun = "optpipe_torch.launch.run"  # a rank of a foreign group has nobody else to say why it ends
    assert printing <= {*within("optpipe_compiler.cli"), *within("optpipe_compiler.view"), under_torchrun}


def test_only_the_commands_end_the_process_or_read_the_command_line():
    for module in set(within("optpipe_compiler")) - set(within("optpipe_compiler.cli")):
        for node in ast.walk(TREES[module]):
            if isinstance(node, ast.If) and "['-m']" in ast.unparse(node.test):  # the package, looked up by python -m
                node.test = ast.Constant(True)
            if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
                node.body = []
        text = ast.unparse(TREES[module])
        assert "sys.exit" not in text, module
        assert "SystemExit" not in text, module
        assert "sys.argv" not in text, module


def test_every_module_says_what_it_is_for():
    for module, tree in TREES.items():
        assert ast.get_docstring(tree), module


# -- imports as they happen ---------------------------------------------------------------------------------------

GATE = """
import sys
from importlib.machinery import PathFinder
real, forbidden = PathFinder.find_spec, set({forbidden!r})
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] in forbidden else real(name, *rest)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a profile and a schedule of it."""
    path = tmp_path_factory.mktemp("files")
    costs = uniform(2, 1)
    (path / "profile.json").write_text(canonical(costs))
    (path / "schedule.json").write_text(ir.to_text(quick(costs, 2 * 10**9).schedule))
    return path


def without(forbidden: list[str], code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python where some packages are not installed, for its child processes neither."""
    (folder / "gate").mkdir(exist_ok=True)
    (folder / "gate" / "sitecustomize.py").write_text(GATE.format(forbidden=forbidden))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "gate"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def command(*arguments: str) -> str:
    return f"import sys; sys.argv = ['optpipe', *{arguments!r}]; from optpipe_compiler.cli import main; main()"


def test_the_gate_forbids(folder):
    assert "No module named 'torch'" in without(["torch"], "import torch", folder).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("compile", "--help"),
        ("run", "--help"),
        ("verify", "schedule.json", "--profile", "profile.json"),
        ("show", "schedule.json"),
        ("profile", "uniform", "-o", "other.json"),
    ],
    ids=" ".join,
)
def test_what_neither_plans_nor_runs_needs_neither_ortools_nor_torch(folder, arguments):
    ended = without(["ortools", "numba", "torch"], command(*arguments), folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout


def test_compile_needs_no_torch(folder):
    arguments = ("compile", "--mem", "1GB", "--microbatches", "3", "--time-limit", "60", "-o", "new.json", "--json")
    ended = without(["torch"], command(*arguments), folder)
    assert ended.returncode == 0
    assert "Error" not in ended.stderr
    assert '"outcome":"optimal"' in ended.stdout


def test_what_needs_torch_says_without_it_how_to_install_it(folder):
    estimated = ("--model", "gpt2", "--gpu", "h100-sxm")
    advise = ("advise", *estimated, "--gpus", "2", "--global-batch", "2", "-j", "1")
    sweep = ("sweep", *estimated, "--mem", "10GB", "-j", "1")
    for arguments in (("run", "schedule.json"), ("profile",), ("profile", *estimated), sweep, advise):
        ended = without(["torch"], command(*arguments), folder)
        assert (ended.returncode, ended.stdout) == (6, "")
        assert ended.stderr.splitlines()[-1].startswith("optpipe: ")
        assert ended.stderr.rstrip().endswith("pip install 'optpipe[runtime]'")
        assert "Traceback" not in ended.stderr


def test_compile_without_ortools_writes_the_best_heuristic_and_says_what_is_missing(folder):
    arguments = ("compile", "--mem", "1500MB", "--microbatches", "4", "--time-limit", "3", "-o", "new.json", "--json")
    ended = without(["ortools"], command(*arguments), folder)
    assert ended.returncode == 0
    assert ended.stderr.splitlines()[-1].endswith("No module named 'ortools'")
    assert "Traceback" not in ended.stderr
    assert '"outcome":"feasible"' in ended.stdout
    assert verify(ir.load(folder / "new.json")) == []


def test_compile_without_numba_says_how_to_install_it(folder):
    ended = without(["numba"], command("compile", "--mem", "1GB", "--microbatches", "3", "--no-cache"), folder)
    assert (ended.returncode, ended.stdout) == (6, "")
    assert ended.stderr.splitlines()[-1] == "optpipe: planning needs numba: pip install numba"
    assert "Traceback" not in ended.stderr


def test_compile_says_what_forbids_numba_to_compile(folder, monkeypatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    ended = without([], command("compile", "--mem", "1GB", "--microbatches", "3", "--no-cache"), folder)
    assert (ended.returncode, ended.stdout) == (6, "")
    assert ended.stderr.splitlines()[-1].endswith("NUMBA_DISABLE_JIT is set, expected not to be")
    assert "Traceback" not in ended.stderr


def test_the_judge_and_the_view_import_neither_ortools_nor_torch_nor_planning(folder):
    planning = ["compiler", "plan", "model", "machine", "lower", "solver", "published"]
    views = [module for module in within("optpipe_compiler.view") if "measured" not in module]
    code = f"""
import importlib, sys
for module in {[*within("optpipe_compiler.verify"), *views]!r}:
    importlib.import_module(module)
loaded = set(sys.modules)
print([name for name in ("ortools", "numba", "torch") if name in loaded])
print([name for name in {planning!r} if "optpipe_compiler." + name in loaded])
"""
    ended = without([], code, folder)
    assert ended.stdout.splitlines() == ["[]", "[]"]


def test_help_starts_quickly_because_it_imports_little(folder):
    code = (
        "import sys; import optpipe_compiler.cli; print([n for n in ('numpy', 'rich', 'ortools') if n in sys.modules])"
    )
    assert without([], code, folder).stdout == "[]\n"


def test_the_replay_imports_neither_click_nor_rich_nor_planning(folder):
    pytest.importorskip("torch")
    code = """
import sys
import runtime_torch
for name, (home, _) in runtime_torch._HOMES.items():
    if home.startswith("runtime_torch."):  # others are layers for models, here by their names alone
        getattr(runtime_torch, name)
print({".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("optpipe_")})
"""
    ended = without(["click", "rich", "ortools", "numba"], code, folder)
    assert ended.returncode == 0, ended.stderr
    replay = {"optpipe_compiler", "optpipe_compiler.documents", "optpipe_compiler.errors"}
    assert ast.literal_eval(ended.stdout) == replay
