"""What every test run shares: hypothesis profiles, a Ray cluster, processes to fork from, and nothing left behind.

The run fails when a process that it started (raylet, GCS, engine core, worker) is still there at its end, whatever the
tests said. Tests that need a GPU are skipped where there is none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest

from rdt_testbed import processes, programs, sharedmemory
from rdt_testbed.cluster import Cluster, Standing, local_cluster, quiet_ray
from rdt_testbed.warm import Warm

GRACE_S = 20.0
_GPUS = Path("/proc/driver/nvidia").exists()

quiet_ray()
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # every process would compile the frameworks anew, 8 seconds each
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(
        Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    )
    sys.dont_write_bytecode = False
# No test may depend on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

hypothesis.settings.register_profile("default", deadline=None, max_examples=200)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=20_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest, warm_core: Warm | None) -> Iterator[Cluster]:
    """A Ray job of this module's own, ended with all of its processes after it whatever happens.

    The number of logical GPUs that its cluster has at least is the fixture's parameter, 0 without one:
    `@pytest.mark.parametrize("ray_cluster", [2], indirect=True)`. A module that defines a fixture `warm_core` that is None
    gets new Python processes instead of forks.
    """
    with local_cluster(gpus=getattr(request, "param", 0), python=warm_core.python if warm_core else "") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def standing() -> Iterator[Standing | None]:
    """The Ray cluster in which the jobs of forked programs and of modules run, one after the other; None: each its own."""
    if _GPUS:
        yield None
        return
    with Standing(gpus=2, cpus=4) as cluster:
        yield cluster


def _warm(modules: Sequence[str], environment: dict[str, str]) -> Iterator[Warm | None]:
    if _GPUS:
        yield None  # what imports them may ask CUDA for devices, and then its forks cannot use any
        return
    with Warm(modules, {"OMP_NUM_THREADS": "1", **environment}) as warm:
        yield warm


@pytest.fixture(scope="session")
def warm_core(standing: Standing | None) -> Iterator[Warm | None]:
    """Where Ray's workers of tests without an engine are forked from; None: everything starts anew."""
    yield from _warm(programs.CORE_MODULES, {})


@pytest.fixture(scope="session")
def warm_vllm(standing: Standing | None) -> Iterator[Warm | None]:
    """Where programs that use vLLM are forked from; None: everything starts anew, as in `programs.run`."""
    yield from _warm(programs.VLLM_MODULES, programs.VLLM_ENVIRONMENT)


@pytest.fixture(scope="session")
def warm_sglang(standing: Standing | None) -> Iterator[Warm | None]:
    """Where programs that use SGLang are forked from; or None."""
    yield from _warm(programs.SGLANG_MODULES, programs.SGLANG_ENVIRONMENT)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rdt", "rdt's own tests")
    group.addoption("--faults", type=int, default=8, help="faults of the random campaign of tests/faults")
    group.addoption("--seed", type=int, default=1, help="of the campaign")
    group.addoption("--fault", action="append", default=[], help="replays a fault that a campaign printed")
    group.addoption("--ray-faults", type=int, default=4, help="faults of the campaign over Ray (thorough)")


def pytest_sessionstart(session: pytest.Session) -> None:
    processes.mark()
    session.config.stash[_SHARED] = sharedmemory.present()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("RDT_THOROUGH"):
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="one more of many alike; RDT_THOROUGH=1 runs it"))
    for_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if for_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in for_gpu:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.option.collectonly:
        return
    left = processes.survivors(GRACE_S)
    lines = [processes.describe(process) for process in left]
    processes.end(left)
    sharedmemory.remove_since(session.config.stash[_SHARED])
    if not left:
        return
    session.config.stash[_LEFT] = lines
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


_LEFT = pytest.StashKey[list[str]]()
_SHARED = pytest.StashKey[set[Path]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(_LEFT, None)
    if lines:
        terminalreporter.section("processes left behind", red=True)
        for line in lines:
            terminalreporter.line(line, red=True)
        terminalreporter.line(
            f"The run failed: {len(lines)} processes of it were still there {GRACE_S:.0f} s after its end."
        )
