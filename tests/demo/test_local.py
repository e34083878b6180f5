"""A cluster of the run's own leaves no process, not even those that others started below it and forgot."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from rdt_core.demo.local import Family, cluster
from rdt_core.errors import RdtError

SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
# prints the number of a grandchild, then ends, so that the grandchild has no parent of this run
PARENT = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"


@pytest.mark.unit
def test_an_orphan_is_ended_and_what_was_there_before_is_not() -> None:
    before = subprocess.Popen(SLEEP)
    try:
        family = Family()
        with subprocess.Popen(
            [sys.executable, "-c", PARENT, *SLEEP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as parent:
            assert parent.stdout is not None
            orphan = psutil.Process(int(parent.stdout.readline()))
            family.note()
        assert parent.wait(timeout=30) == 0
        assert orphan.is_running()
        started = time.monotonic()
        family.end(grace_s=0.5)
        assert time.monotonic() - started < 5
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()


@pytest.mark.integration
def test_a_worker_that_forgets_its_child_leaves_none() -> None:
    import ray

    with cluster(cpus=1) as family:

        @ray.remote
        def forget() -> int:
            return subprocess.Popen(SLEEP).pid

        child = psutil.Process(ray.get(forget.remote(), timeout=60))
        family.note()
        with pytest.raises(RdtError, match="connected to a Ray cluster already"), cluster(cpus=1):
            pass
        assert ray.is_initialized()
    assert not ray.is_initialized()
    assert not child.is_running()
