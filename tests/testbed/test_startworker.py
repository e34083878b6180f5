"""How a raylet's command line becomes a worker's: variables and an executable, and nothing that only Ray knows."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rdt_testbed.startworker import command

pytestmark = pytest.mark.unit

WORKER = ["default_worker.py", "--node-ip-address=1.2.3.4"]


def given(language: str = "PYTHON", **context: Any) -> list[str]:
    return [f"--serialized-runtime-env-context={json.dumps(context)}", f"--language={language}", *WORKER]


def test_variables_and_executable() -> None:
    assert command(given(py_executable="/warm/python", env_vars={"A": "b"}, command_prefix=[], java_jars=[])) == (
        ["/warm/python", *WORKER],
        {"A": "b"},
    )
    assert command(given()) == ([sys.executable, *WORKER], {})
    assert command(WORKER) == ([sys.executable, *WORKER], {})


@pytest.mark.parametrize(
    "context",
    [
        {"command_prefix": ["cd", "/", "&&"]},
        {"override_worker_entrypoint": "other.py"},
        {"env_vars": {"PATH": "${HOME}/bin"}},
        {"language": "JAVA"},
    ],
)
def test_what_only_rays_own_can_do_is_left_to_it(context: dict[str, Any]) -> None:
    assert command(given(**context)) is None
