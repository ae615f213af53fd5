"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
import signal
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from optpipe_compiler.compiler import Options, compile_schedule
from optpipe_compiler.costs.uniform import UniformOptions, uniform_profile
from tests.browser import HOW, browser  # the second is a fixture
from tests.processes import end_started

if TYPE_CHECKING:
    from collections.abc import Iterator

GOLDEN = Path(__file__).parent / "golden"
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")  # how long an example takes depends on what else runs
FORKED = ["torch._dynamo", "torch.distributed.fsdp", "optpipe_torch.launch.session", "bench.stock.crew"]
"""What takes seconds to import; where there is no torch, it is left out. The last has transformers' Llama."""
__all__ = ["browser"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests whose expectations are a CPU's, all but those that `-m gpu` selects; keep threads quiet."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # OpenMP's threads spin while they wait, on the cores of whatever else runs: beside four busy processes on 2 cores
    # `pytest tests/test_runtime_streams.py -k "any_pace and 0-"` took 20 s, and 6 s with threads that sleep.
    os.environ["OPTPIPE_CACHE"] = (
        ""  # plans of the user are neither read nor added to; tests of the cache name a folder
    )
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # As in a run's processes: torch's kernels need other buffers with more threads, and tests run on all cores anyway.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A shell starts what runs in the background with Ctrl-C ignored, and so would be what tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line that the page was not tested, and how to test it."""
    skipped = terminalreporter.stats.get("skipped", [])
    if any(HOW in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(HOW, red=True, bold=True)


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compare text with the golden file of that name; `--update-golden` rewrites it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run make golden"
        assert text == path.read_text()

    return compare


def pytest_sessionstart(session: pytest.Session) -> None:
    """With pytest -n: compile the machine before its processes begin, so that they do not all compile it."""
    if session.config.getoption("numprocesses", None) and not session.config.option.collectonly:
        load_machine()


@pytest.fixture(scope="session", autouse=True)
def compiled_machine() -> None:
    """Have the machine before the first test, so that no time limit of a test pays for it."""
    load_machine()


@pytest.fixture(scope="session", autouse=True)
def one_server() -> Iterator[None]:
    """Let the server that processes are forked from import what any of them needs, whichever test starts it."""
    forkserver.set_forkserver_preload(FORKED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "set_forkserver_preload", lambda names: None)
        yield


@pytest.fixture(autouse=True)
def no_process_outlives_its_test() -> Iterator[None]:
    """End what a test that failed has left running, or the tests after it fail, too."""
    yield
    end_started()


@pytest.fixture(autouse=True)
def ctrl_c_means_what_it_meant() -> Iterator[None]:
    """Refuse a test that leaves Ctrl-C blocked or ignored: what later tests start would not hear it."""
    yield
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def load_machine() -> None:
    """Load the compiled machine; compile it where this version has not run here before."""
    profile = uniform_profile(UniformOptions(devices=2))
    compile_schedule(profile, Options(mem_bytes=10**10, microbatches=3, reproducible=True, time_limit_s=0.5))
