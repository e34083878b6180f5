"""Messages between the processes of a world: pickled frames over Unix sockets, each read within a deadline.

Errors travel as class and message and are raised again as rdt's own classes. Only for processes of one test.
"""

from __future__ import annotations

import pickle
import socket
import struct
import time
from typing import Any

from rdt_core import errors
from rdt_core.errors import RdtError

_LENGTH = struct.Struct("!I")


def send(sock: socket.socket, message: Any) -> None:
    """Sends one message."""
    data = pickle.dumps(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket, deadline: float | None = None) -> Any:
    """Returns the next message.

    Args:
        sock: connected.
        deadline: `time.monotonic()` value.

    Raises:
        TimeoutError: nothing complete by then.
        EOFError: the other side is gone.
    """
    return pickle.loads(_exactly(sock, _LENGTH.unpack(_exactly(sock, _LENGTH.size, deadline))[0], deadline))


def _exactly(sock: socket.socket, count: int, deadline: float | None) -> bytes:
    data = b""
    while len(data) < count:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
        try:
            part = sock.recv(count - len(data))
        except ConnectionError as error:
            raise EOFError from error
        if not part:
            raise EOFError
        data += part
    return data


def describe(error: BaseException) -> tuple[str, str]:
    """Returns an error as class name and message."""
    return type(error).__name__, str(error) or repr(error)


def restored(described: tuple[str, str]) -> Exception:
    """Returns the error that `describe` described; a RuntimeError for what is none of rdt's."""
    name, message = described
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, RdtError):
        return kind(message)
    return RuntimeError(f"{name}: {message}")
