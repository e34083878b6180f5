"""A cluster of the run's own leaves no process, not even those that others started below it and forgot."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rdt_core.errors import RdtError
from rdt_core.localcluster import Family, cluster

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


# makes shared memory, and tells its name
OWNER = (
    "import sys; from multiprocessing import shared_memory as s; a = s.SharedMemory(create=True, size=4096); "
    "print(a.name, flush=True); sys.stdin.read()"
)


@pytest.mark.unit
@pytest.mark.parametrize("is_shared", [False, True])
def test_shared_memory_of_a_process_that_was_killed_is_removed_unless_somebody_has_it(is_shared: bool) -> None:
    family = Family()
    outside = None
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = Path("/dev/shm", owner.stdout.readline().strip())
        if is_shared:
            with path.open("r+b") as file:
                outside = mmap.mmap(file.fileno(), 4096)
        family.note()
        for process in (
            *psutil.Process(owner.pid).children(),
            owner,
        ):  # the tracker first, as a machine without memory may
            process.kill()
    try:
        assert path.exists()
        family.end(grace_s=0.5)
        assert path.exists() == is_shared
    finally:
        if outside is not None:
            outside.close()
        path.unlink(missing_ok=True)


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
