"""A small HTTP client for the servers of engines: JSON in, JSON or text out, a deadline on every request.

Standard library only, so that a trainer that drives an engine needs nothing of the engine's. It refuses answers with an
error status, and says which route of which server did not answer.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from .errors import DeadlineError, EngineError

#: bytes of an answer that are read at most
MAX_ANSWER = 16 << 20
#: characters of it in a message
MAX_TOLD = 4000


class StatusError(EngineError):
    """The server answered with an error status.

    Attributes:
        status: of the answer.
        body: its text.
    """

    def __init__(self, message: str, status: int, body: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class Web:
    """One server.

    Args:
        url: e.g. `http://node7:8000`.
        headers: sent with every request, e.g. `{"Authorization": "Bearer …"}`.

    Raises:
        EngineError: `url` is no URL of an HTTP server.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise EngineError(f"{url!r} is no URL of an HTTP server; expected something like http://host:8000")
        self.url = url.rstrip("/")
        self.host = parts.hostname or ""
        self.netloc = parts.netloc
        self._headers = dict(headers or {})

    def get(self, path: str, *, deadline: float) -> Any:
        """GETs a route; see `request`."""
        return self.request("GET", path, None, deadline)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, deadline: float) -> Any:
        """POSTs a JSON object to a route; see `request`."""
        return self.request("POST", path, body or {}, deadline)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float) -> Any:
        """Sends one request.

        Args:
            method: "GET" or "POST".
            path: of the route, without a leading slash; may end with a query.
            body: sent as JSON.
            deadline: `time.monotonic()` by which the answer must be there.

        Returns:
            The decoded JSON, or the text where the answer is none.

        Raises:
            StatusError: an error status.
            DeadlineError: no answer in time.
            EngineError: no server there, or the connection broke.
        """
        where = f"{method} {self.url}/{path}"
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"{where} was not sent: its deadline has passed")
        request = urllib.request.Request(
            f"{self.url}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self._headers},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=left) as answer:
                raw = _read(answer, deadline)
        except urllib.error.HTTPError as error:
            told = _read(error, deadline).decode(errors="replace")
            message = f"{where} failed with status {error.code}: {told[:MAX_TOLD]}"
            raise StatusError(message, error.code, told) from error
        except TimeoutError as error:
            raise DeadlineError(f"{where} was not answered within {left:.1f} s") from error
        except (urllib.error.URLError, OSError) as error:
            if isinstance(getattr(error, "reason", None), TimeoutError):
                raise DeadlineError(f"{where} was not answered within {left:.1f} s") from error
            if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                raise EngineError(
                    f"{where}: no answer, nothing listens at {self.url} ({error}). Start the engine, and wait until it answers "
                    f"{self.url}/health: nothing here waits for it; or correct the URL"
                ) from error
            raise EngineError(f"{where}: no answer: {error}") from error
        text = raw.decode(errors="replace")
        try:
            return json.loads(text)
        except ValueError:
            return text


def _read(answer: Any, deadline: float) -> bytes:
    """Reads an answer; a server that sends byte after byte must not hold the caller past its deadline."""
    parts: list[bytes] = []
    size = 0
    while size < MAX_ANSWER:
        if time.monotonic() > deadline:
            raise TimeoutError
        part = answer.read1(MAX_ANSWER - size)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)
