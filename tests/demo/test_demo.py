"""The main job as a user runs it: a real engine, real ranks, a tiny checkpoint; and how it ends when all goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rdt_testbed.warm import Warm

pytestmark = pytest.mark.engine

TIMEOUT_S = 400
STEP_FIELDS = {"version", "reward", "seconds", "phases", "bytes", "mode", "links", "max_abs_logprob_error"}


#: the compiler of vLLM's and SGLang's samplers would take longer than the run
ENVIRONMENT = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}


def _run(command: list[str], fork: Warm | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a command; with `fork`, it and its engine are forked from what has imported the engine already."""
    return subprocess.run(
        [fork.python, *command[1:]] if fork else command,
        env={**ENVIRONMENT, **(fork.variables if fork else {})},
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def _command(checkpoint: Path, out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "rdt_core.cli", "demo", "--model", str(checkpoint), "--out", str(out), *arguments]


def _unmapped() -> set[str]:
    """Shared memory of vLLM's message queues that no process has mapped."""
    mapped = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            mapped |= {line.split()[-1] for line in maps.splitlines() if "/dev/shm/psm_" in line}
    return {str(path) for path in Path("/dev/shm").glob("psm_*")} - mapped


def _payload(checkpoint: Path, itemsize: int) -> int:
    from safetensors import safe_open

    (file,) = checkpoint.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return itemsize * sum(opened.get_tensor(name).numel() for name in opened.keys())  # noqa: SIM118 - no mapping


def test_json_is_the_report_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    before = _unmapped()
    result = _run(_command(checkpoint, tmp_path, "--steps", "2", "--json"))  # all anew, as a user's
    assert result.returncode == 0, result.stderr
    assert _unmapped() <= before, "the engine left shared memory behind"
    report = json.loads(result.stdout)
    assert result.stdout == (tmp_path / "report.json").read_text()
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")

    assert set(report) == {"trainer", "engine", "model", "rdt", "date", "mode_reason", "checkpoint", "steps"}
    assert 0 <= report["checkpoint"]["reward"] <= 1
    assert report["checkpoint"]["max_abs_logprob_error"] < 1e-4
    assert report["trainer"] == "fsdp:ranks=2"
    assert report["engine"].startswith("vllm 0.")
    assert report["model"] == checkpoint.name
    assert [step["version"] for step in report["steps"]] == [1, 2]
    for step in report["steps"]:
        assert set(step) == STEP_FIELDS
        assert 0 <= step["reward"] <= 1
        assert step["mode"] == "live"
        assert step["bytes"] == _payload(checkpoint, 4) == sum(link["bytes"] for link in step["links"])
        assert {(link["source"], link["reader"], link["kind"]) for link in step["links"]} == {
            (0, "vllm/0", "mapped"),
            (1, "vllm/0", "mapped"),
        }
        assert all(0 < seconds <= step["seconds"] + 1e-6 for seconds in step["phases"].values())
        assert step["max_abs_logprob_error"] < 1e-4


def test_sglang_serves_every_version(checkpoint: Path, tmp_path: Path, warm_sglang: Warm | None) -> None:
    result = _run(_command(checkpoint, tmp_path, "--engine", "sglang", "--steps", "2", "--json"), warm_sglang)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["engine"].startswith("sglang 0.")
    assert [step["version"] for step in report["steps"]] == [1, 2]
    for step in report["steps"]:
        assert step["bytes"] == _payload(checkpoint, 4) == sum(link["bytes"] for link in step["links"])
        assert {(link["source"], link["reader"], link["kind"]) for link in step["links"]} == {
            (0, "sglang/0", "mapped"),
            (1, "sglang/0", "mapped"),
        }
        assert step["max_abs_logprob_error"] < 1e-4


def test_the_table_tells_mode_and_link_that_were_asked_for(
    checkpoint: Path, tmp_path: Path, warm_vllm: Warm | None
) -> None:
    arguments = ("--steps", "1", "--dtype", "bfloat16", "--mode", "bucket", "--link", "prepared")
    result = _run(_command(checkpoint, tmp_path, *arguments), warm_vllm)
    assert result.returncode == 0, result.stderr
    row = next(line.split("│") for line in result.stdout.splitlines() if line.startswith("│       1 "))
    assert row[6].strip() == "bucket"
    assert "2 prepared" in row[7]
    (step,) = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert step["bytes"] == _payload(checkpoint, 2)
    assert "every version served was the version trained" in result.stdout


def test_an_engine_that_serves_other_weights_ends_the_run(
    checkpoint: Path, tmp_path: Path, warm_vllm: Warm | None
) -> None:
    program = Path(__file__).with_name("reloading_program.py")
    result = _run([sys.executable, str(program), str(checkpoint), str(tmp_path)], warm_vllm)
    assert result.returncode == 1, result.stderr
    assert "DemoError: version 1: the engine's log-probabilities differ from the trainer's" in result.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize(
    ("number", "status", "last"),
    [
        (signal.SIGINT, 130, "raylet"),
        (signal.SIGTERM, 143, "EngineCore"),
        # half a minute of imports each
        pytest.param(signal.SIGTERM, 143, "raylet", marks=pytest.mark.thorough),
        pytest.param(signal.SIGINT, 130, "EngineCore", marks=pytest.mark.thorough),
    ],
)
def test_a_signal_while_it_starts_ends_everything(
    checkpoint: Path, tmp_path: Path, number: signal.Signals, status: int, last: str
) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        run = subprocess.Popen(_command(checkpoint, tmp_path), stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + TIMEOUT_S / 2
        while not _started(run.pid, last):
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, f"no process {last} was seen"
            time.sleep(0.2)
        family = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(number)
        assert run.wait(timeout=TIMEOUT_S / 4) == status, log.read_text()
    finally:
        if run.poll() is None:
            left = psutil.Process(run.pid).children(recursive=True)
            for process in (run, *left):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            run.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert [process.name() for process in alive] == []
    assert not (tmp_path / "report.json").exists()


def _started(parent: int, name: str) -> bool:
    for process in psutil.Process(parent).children(recursive=True):
        try:
            if name in process.name() or any(name in part for part in process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False
