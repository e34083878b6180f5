"""Standard output of `rdt doctor` holds what rdt prints and nothing that a library or a child process writes there."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import sys

import pytest

from rdt_core.doctor.results import only_results

pytestmark = pytest.mark.integration

LIMIT_S = 120
#: with PYTHONUNBUFFERED the C library would not hold anything back either
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
PROGRAM = """
import ctypes, os, subprocess, sys
from rdt_core.doctor.results import only_results
c = ctypes.CDLL(None)
c.puts(b"before")
c.fflush(None)
with only_results(sys.stdout) as out:
    c.puts(b"from C")
    os.write(1, b"descriptor\\n")
    subprocess.run(["echo", "child"], check=True)
    print("results é", file=out)
os.write(1, b"after\\n")
"""


def test_what_others_write_goes_to_standard_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, timeout=LIMIT_S, check=True,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    assert done.stdout.decode() == "before\nresults é\nafter\n"
    assert sorted(done.stderr.decode().splitlines()) == ["child", "descriptor", "from C"]


def test_a_closed_standard_error_takes_nothing_down() -> None:
    command = f"{shlex.join([sys.executable, '-c', PROGRAM])} 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, timeout=LIMIT_S, check=True, env=ENVIRONMENT)
    assert done.stdout.decode() == "before\nresults é\nafter\n"


def test_a_stream_in_memory_is_used_as_it_is() -> None:
    target = io.StringIO()
    with only_results(target) as out:
        assert out is target


def test_exports_are_a_shell_s_lines_whatever_ucx_logs() -> None:
    wrong = {
        "UCX_LOG_LEVEL": "debug", "UCX_TLS": "tpc", "NIXL_PLUGIN_DIR": "/nonexistent", "RAY_AUTH_MODE": "tokens",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "rdt_core.cli", "doctor", "--no-measure", "--fix-env"], env={**ENVIRONMENT, **wrong},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    made = dict(shlex.split(line)[1].split("=", 1) for line in done.stdout.splitlines())
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"export"}
    assert made.keys() == {"UCX_LOG_LEVEL", "UCX_TLS", "NIXL_PLUGIN_DIR"}
    assert (made["UCX_LOG_LEVEL"], made["UCX_TLS"]) == ("warn", "all")
    assert os.path.isfile(os.path.join(made["NIXL_PLUGIN_DIR"], "libplugin_UCX.so"))
    assert "UCX  DEBUG" in done.stderr  # it did log
