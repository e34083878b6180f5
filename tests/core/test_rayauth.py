"""What a refused connection to Ray is explained by: a token that is there and not sent, one that is not taken, neither."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from rdt_core.rayauth import has_token, way_out

pytestmark = pytest.mark.unit

SILENT = ConnectionError("Failed to connect to the Ray cluster")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a token, and no variable of Ray's."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def leave_token(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text("secret")


def test_a_token_that_is_not_sent(home: Path) -> None:
    assert not has_token()
    assert way_out(SILENT) == ""
    leave_token(home)
    assert has_token()
    told = way_out(SILENT)
    assert "RAY_AUTH_MODE is not set" in told
    assert f"process {os.getpid()} on {socket.gethostname()} sends none" in told
    assert "start that process with RAY_AUTH_MODE=token" in told
    assert "RAY_AUTH_MODE=disabled on both sides" in told
    assert "secret" not in told


def test_what_ray_says_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_MODE is disabled" in way_out(RuntimeError("Unauthenticated: InvalidAuthToken"))


def test_a_token_that_the_cluster_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    assert f"does not take the token of process {os.getpid()} on " in way_out(
        RuntimeError("AuthenticationError: invalid")
    )
    assert way_out(SILENT) == ""


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        TimeoutError("timed out"),
        ConnectionError("Could not find any running Ray instance. Please specify the one to connect to"),
        RuntimeError("Version mismatch: The cluster was started with Ray 2.56.0"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_has_another_cause(home: Path, error: Exception) -> None:
    leave_token(home)
    assert way_out(error) == ""
