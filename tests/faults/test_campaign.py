"""A seeded random campaign of faults: nobody serves wrong weights, nobody waits for ever, nothing is left behind.

`pytest tests/faults --faults N --seed S` runs long; `--fault SPEC` replays what it printed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from rdt_testbed.faults.campaign import Runner, Trial

pytestmark = [pytest.mark.integration, pytest.mark.timeout(0)]

_SHARED = Path("/dev/shm")


def test_no_promise_is_broken(runner: Runner, summaries, request, capfd):
    if request.config.getoption("--fault"):
        pytest.skip("one fault is replayed")
    before = set(_SHARED.glob("torch_*"))
    said: list[str] = []
    faults = request.config.getoption("--faults")
    with capfd.disabled():  # a long campaign shows how far it is, on a terminal
        console = Console(stderr=True)
        with Progress(
            *Progress.get_default_columns(), console=console, transient=True, disable=not console.is_terminal
        ) as bar:
            task = bar.add_task("faults", total=faults)
            summary = runner.campaign(
                faults,
                request.config.getoption("--seed"),
                stop_at=5,
                say=said.append,
                advance=lambda done: bar.update(task, completed=done),
            )
    summaries.append(summary)
    assert not said, "\n".join(said)
    mine = {f"torch_{pid}_" for pid in runner.pids}
    left = [path for path in set(_SHARED.glob("torch_*")) - before if path.name.startswith(tuple(mine))]
    assert not left, f"shared memory is left: {left}"


def test_replay(runner: Runner, request):
    specs = request.config.getoption("--fault")
    if not specs:
        pytest.skip("--fault SPEC replays a fault that a campaign found")
    for spec in specs:
        runner.run(Trial.parse(spec))
