"""Processes of a run are found when their parent is gone, renamed ones included, and others are not."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

# A run of its own, so that this run's mark is not replaced.
ORPHAN = """
import subprocess, sys
import psutil
from rdt_testbed import processes
if {marked}:
    processes.mark()
rename = "import setproctitle, time; setproctitle.setproctitle('engine' * 20); time.sleep(60)"
start = "import sys; from subprocess import DEVNULL, Popen; "
start += "print(Popen([sys.executable, '-c', sys.argv[1]], stdout=DEVNULL, stderr=DEVNULL).pid)"
pid = int(subprocess.run([sys.executable, "-c", start, rename], capture_output=True, text=True, check=True).stdout)
orphan = psutil.Process(pid)
while not {marked} and "engine" not in " ".join(orphan.cmdline()):
    pass
left = processes.survivors(2)
print([process.pid for process in left] == [pid], str(pid) in "".join(map(processes.describe, left)))
processes.end([orphan])
print(psutil.pid_exists(pid) and orphan.status() != psutil.STATUS_ZOMBIE)
"""


@pytest.mark.parametrize("marked", [True, False])
def test_an_orphan_is_found_by_its_mark(marked: bool) -> None:
    script = ORPHAN.format(marked=marked)
    env_free = ["env", "-u", "RDT_TEST_RUN", "-u", "SPT_NOENV", sys.executable, "-c", script]
    result = subprocess.run(env_free, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout.splitlines() == [f"{marked} {marked}", "False"], result.stderr


def test_nothing_left_is_no_wait() -> None:
    script = "import time; from rdt_testbed import processes; processes.mark(); t = time.monotonic()"
    script += "; print(processes.survivors(30)); print(time.monotonic() - t < 5)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines() == ["[]", "True"], result.stderr
