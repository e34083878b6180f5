"""What the fault tests share: one process that members are forked from, and the campaign's summary at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rdt_testbed.faults.campaign import Runner
from rdt_testbed.faults.nursery import Nursery
from rdt_testbed.faults.summary import Heartbeat, Summary

SUMMARIES = pytest.StashKey[list[Summary]]()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made


@pytest.fixture
def runner(nursery: Nursery) -> Iterator[Runner]:
    with Heartbeat() as heartbeat:
        made = Runner(nursery, heartbeat)
        yield made
        made.close()


@pytest.fixture
def summaries(request: pytest.FixtureRequest) -> list[Summary]:
    """Printed at the end of the run."""
    return request.config.stash.setdefault(SUMMARIES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for summary in config.stash.get(SUMMARIES, []):
        terminalreporter.section("faults")
        terminalreporter.line(str(summary))
