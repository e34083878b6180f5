"""The HTTP client of engines: what is said where nobody answers."""

from __future__ import annotations

import socket
import time

import pytest

from rdt_core.errors import DeadlineError, EngineError
from rdt_core.web import Web

pytestmark = pytest.mark.unit


def test_an_engine_that_was_not_started() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens: a connection is refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            EngineError,
            match=f"GET {url}/server_info: no answer, nothing listens at {url} .*Start the engine, and wait until it answers "
            f"{url}/health: nothing here waits for it",
        ):
            Web(url).get("server_info", deadline=time.monotonic() + 5)


def test_a_server_that_is_silent() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineError, match="was not answered within"):
            Web(url).get("health", deadline=time.monotonic() + 0.2)
