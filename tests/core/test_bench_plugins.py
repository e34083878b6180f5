"""Peers that packages supply: who can measure, and a program that answers, fails, or does not end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from rdt_core.bench import BenchOptions, PeerRow, plugins
from rdt_core.errors import DeadlineError, EngineError

pytestmark = pytest.mark.integration


class Never:
    def reason(self, options: BenchOptions) -> str:
        return f"not on a {options.device}"

    def measure(self, options: BenchOptions) -> Sequence[PeerRow]:
        raise AssertionError


class Able(Never):
    def reason(self, options: BenchOptions) -> str:
        return ""


class Point:
    def __init__(self, name: str, made: type | None) -> None:
        self.name, self.value, self._made = name, f"somewhere:{name}", made

    def load(self) -> type:
        if self._made is None:
            raise ImportError("no such module")
        return self._made


def supplied(monkeypatch: pytest.MonkeyPatch, *points: Point) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda group: [one for one in points if group == plugins.GROUP])


def test_the_first_that_can_is_taken_and_else_every_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    supplied(monkeypatch, Point("mine", None), Point("mine", Never), Point("other", Able))
    assert list(plugins.installed_peers()) == ["mine", "other"]
    assert plugins.provider("mine", BenchOptions()) == (
        None,
        "somewhere:mine cannot be imported: no such module; not on a cpu",
    )
    assert isinstance(plugins.provider("other", BenchOptions())[0], Able)
    assert "no installed package supplies it" in plugins.provider("nobody", BenchOptions())[1]


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:
    (folder / "bench_program_of_a_test.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return "bench_program_of_a_test"


def answer(module: str, folder: Path, timeout_s: float = 60.0) -> Any:
    return plugins.run_program(module, {"a": [1]}, environment={"PYTHONPATH": str(folder)}, timeout_s=timeout_s)


def test_a_program_is_given_the_request_and_gives_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = program(
        tmp_path, monkeypatch,
        "import json, sys; given = json.load(open(sys.argv[1])); print('noise'); print(json.dumps(given['a'] + [2]))",
    )  # fmt: skip
    assert answer(module, tmp_path) == [1, 2]


def test_a_program_that_fails_tells_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = program(tmp_path, monkeypatch, "raise ValueError('engine fell over')")
    with pytest.raises(EngineError, match=r"status 1: (.|\n)*engine fell over"):
        answer(module, tmp_path)
    module = program(tmp_path, monkeypatch, "print('no JSON')")
    with pytest.raises(EngineError, match=r"gave no answer: .*no JSON"):
        answer(module, tmp_path)


def test_what_a_program_leaves_behind_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = program(
        tmp_path, monkeypatch,
        "import subprocess; print(subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=2).pid)",
    )  # fmt: skip
    assert not psutil.pid_exists(answer(module, tmp_path))


def test_a_program_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = program(tmp_path, monkeypatch, "import threading; threading.Event().wait()")
    with pytest.raises(DeadlineError, match="was not done after"):
        answer(module, tmp_path, timeout_s=0.5)


def test_all_below_a_program_is_ended_with_it() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True).wait()"],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    below: list[psutil.Process] = []
    while not below:
        assert child.poll() is None
        below = psutil.Process(child.pid).children()
    plugins._end(child, "no mark")
    assert not psutil.pid_exists(below[0].pid)
    assert child.returncode is not None
