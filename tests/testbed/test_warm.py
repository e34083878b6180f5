"""Forks that stand in for new Pythons: they get what a new one would, and end as one would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rdt_testbed.warm import Warm

pytestmark = pytest.mark.integration

SPAWNING = """
import multiprocessing, os, sys

def work(queue):
    queue.put(("decimal" in sys.modules, os.getpid()))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue,))
    process.start()
    print(*queue.get(timeout=30), process.pid)
    process.join(30)
    sys.exit(process.exitcode)
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with Warm(["decimal"], {"OMP_NUM_THREADS": "1"}) as one:
        yield one


def test_arguments_environment_folder_files_and_status_are_those_of_who_asks(warm: Warm, tmp_path: Path) -> None:
    code = "import os, sys; print('decimal' in sys.modules, sys.argv, os.environ['X'], os.getcwd())"
    code += "; os.write(int(sys.argv[1]), b'w')"
    reader, writer = os.pipe()
    done = subprocess.run(
        [warm.python, "-c", f"{code}; sys.exit(3)", str(writer)],
        env={**os.environ, "X": "y"}, cwd=tmp_path, pass_fds=[writer], capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.stdout.split(maxsplit=1) == ["True", f"['-c', '{writer}'] y {tmp_path}\n"], done.stderr
    assert done.returncode == 3
    os.close(writer)
    assert os.read(reader, 8) == b"w"
    assert os.read(reader, 8) == b""  # nobody holds the other end
    os.close(reader)


def test_an_error_is_told(warm: Warm) -> None:
    done = subprocess.run([warm.python, "-c", "1 / 0"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_scripts_and_their_spawned_processes_are_forks(warm: Warm, tmp_path: Path) -> None:
    script = tmp_path / "spawning.py"
    script.write_text(SPAWNING)
    done = subprocess.run([warm.python, script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    imported, pid, stand_in = done.stdout.split()
    assert imported == "True"
    assert pid != stand_in


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_who_ends_the_stand_in_ends_the_fork(warm: Warm, number: signal.Signals) -> None:
    asked = subprocess.Popen(
        [warm.python, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(100)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asked.stdout is not None
    fork = psutil.Process(int(asked.stdout.readline()))
    asked.send_signal(number)
    assert asked.wait(30) == -number
    assert psutil.wait_procs([fork], timeout=30)[1] == []
    asked.stdout.close()


def test_a_killed_fork_ends_the_stand_in_alike(warm: Warm) -> None:
    asked = subprocess.run([warm.python, "-c", "import os; os.kill(os.getpid(), 9)"], timeout=30, check=False)
    assert asked.returncode == -signal.SIGKILL


def test_a_module_that_cannot_be_imported_is_an_error() -> None:
    with pytest.raises(AssertionError, match="importing no_such_module failed"):
        Warm(["no_such_module"], {})


def test_its_end_ends_every_fork() -> None:
    with Warm([], {"OMP_NUM_THREADS": "1"}) as one:
        asked = subprocess.Popen(
            [one.python, "-c", "print(1, flush=True); import time; time.sleep(100)"], stdout=subprocess.PIPE
        )
        assert asked.stdout is not None
        asked.stdout.readline()
        assert sys.executable != one.python
    assert asked.wait(30) != 0
    asked.stdout.close()
