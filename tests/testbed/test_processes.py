"""Descendants are found when their parent is gone, and nothing but descendants is ended."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

# A process of its own, because the reaper is chosen for a process's whole life.
ORPHAN = """
import subprocess, sys, time
from rdt_testbed import processes
if {adopt}:
    processes.adopt_orphans()
child = "from subprocess import DEVNULL, Popen; print(Popen(['sleep', '60'], stdout=DEVNULL, stderr=DEVNULL).pid)"
pid = int(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout)
left = processes.survivors(0.3)
print([process.pid for process in left] == [pid], "sleep" in "".join(map(processes.describe, left)))
import psutil
if not {adopt}:
    left = [psutil.Process(pid)]
processes.end(left)
print(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
"""


@pytest.mark.parametrize("adopt", [True, False])
def test_an_orphan_is_found_only_by_its_reaper(adopt: bool) -> None:
    script = ORPHAN.format(adopt=adopt)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == [f"{adopt} {adopt}", "False"], result.stderr


def test_nothing_left_is_no_wait() -> None:
    script = "import time; from rdt_testbed import processes; t = time.monotonic(); print(processes.survivors(30))"
    script += "; print(time.monotonic() - t < 5)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == ["[]", "True"], result.stderr
