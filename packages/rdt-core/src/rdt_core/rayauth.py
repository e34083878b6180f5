"""What Ray's token authentication has to do with a connection that failed: the way out, for an error message.

A cluster asks for a token as soon as its head finds one, or makes one; a process that connects by an address sends it only
with RAY_AUTH_MODE=token. Ray's own error does not always say so. This only explains: it sets no variable and reads no token.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def has_token() -> bool:
    """Whether Ray would find a token in this process: in its environment, or in ~/.ray/auth_token."""
    try:
        return any(os.environ.get(name) for name in _TOKENS) or (Path.home() / ".ray" / "auth_token").is_file()
    except (OSError, RuntimeError):  # a home that cannot be read, or none
        return False


def way_out(error: BaseException) -> str:
    """Returns what to do where a token is the likely reason why Ray did not connect, to be put behind a message, or "".

    It names the process that did not connect, since an engine's error is read in the trainer's traceback.

    Args:
        error: that `ray.init` raised.
    """
    text = str(error)
    said = any(word in text for word in ("AuthToken", "uthenticat"))
    unreachable = isinstance(error, TimeoutError) or getattr(error, "errno", None) is not None
    silent = isinstance(error, ConnectionError) and not unreachable and "Could not find any running" not in text
    mode = os.environ.get(MODE, "")
    who = f"process {os.getpid()} on {socket.gethostname()}"
    if mode.lower() == "token":
        if not said:
            return ""
        return (
            f". The cluster does not take the token of {who}: put that of the cluster's head (`ray get-auth-token` there) "
            "into ~/.ray/auth_token on that node, or into RAY_AUTH_TOKEN of that process"
        )
    if not said and not (silent and has_token()):
        return ""
    return (
        f". Ray's clusters ask for a token where they find or make one, and {who} sends none ({MODE} is {mode or 'not set'} "
        f"there): start that process with {MODE}=token, and the token of the cluster's head in ~/.ray/auth_token of its node or "
        f"in RAY_AUTH_TOKEN; or set {MODE}=disabled on both sides, before the cluster starts"
    )
