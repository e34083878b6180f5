"""What the actors that host an engine have in common, whichever engine it is: how a sample looks, and how they end.

No engine is imported here, so that a trainer can read samples without one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Generation:
    """One sample.

    Attributes:
        token_ids: generated tokens, a stop token included.
        logprobs: natural logarithm of each token's probability; which one, the server's `generate` says.
        finish_reason: "stop", "length" or "abort".
        versions: weight version of each token, as the engine says; empty where it does not.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[str, ...] = ()


def end(handle: Any, *, timeout_s: float = 60.0) -> None:
    """Ends a server's actor with its whole engine, dead or alive, so that what it was placed on is free again.

    Args:
        handle: of an actor with a method `shutdown`.
        timeout_s: seconds for an orderly end; then the actor is killed, and Ray ends the actors it owns.
    """
    import ray

    # an engine that is dead or stuck is what this is for
    with contextlib.suppress(Exception):
        ray.get(handle.shutdown.remote(), timeout=timeout_s)
    with contextlib.suppress(Exception):
        ray.kill(handle)
