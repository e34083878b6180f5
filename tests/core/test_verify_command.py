"""The command `rdt verify` without an engine: what cannot work is refused, and what was found is shown."""

from __future__ import annotations

import io
import json

import pytest
from typer.testing import CliRunner

from rdt_core import verifycommand
from rdt_core.cli import app
from rdt_core.errors import EngineError, SourceError
from rdt_core.verifycommand import client_of, verify_checkpoint, verify_command
from rdt_core.wire import CheckReport, TensorCheck

pytestmark = pytest.mark.unit


def report(*states: str) -> CheckReport:
    tensors = [
        TensorCheck(
            name=f"layers.{index}.w", replica="node7:8000", state=state, bytes=1 << 20, detail="rows 0 to 3 of 9"
        )
        for index, state in enumerate(states)
    ]
    return CheckReport(
        group="verify",
        version=None,
        replicas=("node7:8000",),
        seconds=0.5,
        bytes=len(states) << 20,
        tensors=tuple(tensors),
    )


def test_what_differs_is_shown_and_is_the_exit_status() -> None:
    out = io.StringIO()
    assert verify_command(out, report("equal", "differs", "not comparable"), json=False, all_rows=False) == 1
    text = out.getvalue()
    assert "layers.1.w" in text
    assert "rows 0 to 3 of 9" in text
    assert "layers.0.w" not in text
    assert "1 equal, 1 differs, 1 not comparable, 0 not taken; 3.1 MB compared in 0.50 s (0.01 GB/s)" in text
    out = io.StringIO()
    assert verify_command(out, report("equal", "not taken"), json=False, all_rows=True) == 0
    assert "layers.0.w" in out.getvalue()
    out = io.StringIO()
    assert verify_command(out, report("differs"), json=True, all_rows=False) == 1
    assert json.loads(out.getvalue())["tensors"][0]["state"] == "differs"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [([], "name at least one server"), (["--vllm", "http://127.0.0.1:1", "--dtype", "int3"], "--dtype is one of")],
)
def test_a_command_line_that_cannot_work(tmp_path, arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["verify", "--checkpoint", str(tmp_path), *arguments])
    assert done.exit_code == 2
    assert told in done.output


def test_a_folder_without_a_checkpoint(tmp_path) -> None:
    with pytest.raises(SourceError, match="holds no checkpoint"):
        verify_checkpoint(tmp_path, [], dtype="", address=None, timeout_s=1.0)
    done = CliRunner().invoke(app, ["verify", "--checkpoint", str(tmp_path), "--sglang", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert "rdt verify failed: SourceError" in done.output


def test_clients_are_found_by_the_engine_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_of("vllm", "http://node7:8000", {}).name == "node7:8000"
    assert client_of("sglang", "http://node7:30000", {}).name == "node7:30000"
    monkeypatch.setitem(verifycommand._CLIENTS, "vllm", ("rdt_nothing.clients", "VllmHttpEngine", {}))
    with pytest.raises(EngineError, match="pip install rdt-vllm"):
        client_of("vllm", "http://node7:8000", {})
