"""What both sides of a sync must agree on: the calls to a scheduler, the routes, and how an outcome travels as text.

A call reaches every scheduler of one engine, as a method of its actor or through SGLang's own RPC, and each answers for
itself. It refuses unknown calls and arguments, so that nothing else can be reached over HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rdt_core.errors import DeadlineError, EngineError, RdtError, TornReplicaError, WireError

#: name of a call: method of the scheduler's actor, names and types of the arguments
CALLS: dict[str, tuple[str, dict[str, type | tuple[type, ...]]]] = {
    "prepare": ("prepare_weights", {"info": dict}),
    "begin": ("begin_weights", {"version": int, "timeout_s": (int, float)}),
    "pull": ("pull_weights", {"version": int, "timeout_s": (int, float)}),
    "finish": ("finish_weights", {"version": int, "timeout_s": (int, float)}),
    "abort": ("abort_weights", {"version": int, "reason": str}),
    "status": ("weights_status", {}),
    "close": ("release_weights", {}),
}
#: those of them that begin or end a sync, or a step of it
STEPPING = frozenset({"begin", "pull", "finish", "abort", "close"})
#: concurrency group of those methods; SGLang's event loop never leaves the default one
WEIGHTS_GROUP = "weights"
#: method of SGLang's RPC that carries a call to plain scheduler processes
RPC_METHOD = "rdt_weights"

WEIGHTS_ROUTE = "rdt/weights"
ACTORS_ROUTE = "rdt/actors"
#: bytes of the largest body that the weights route reads
MAX_BODY = 1 << 20

#: what an engine is stamped with from the first byte of a sync to its commit, before the version
RECEIVING = "receiving "
#: what SGLang says before the first sync, unless it was started with `--weight-version`
UNSTAMPED = "default"

_CLASSES: dict[str, type[RdtError]] = {
    one.__name__: one for one in (DeadlineError, EngineError, TornReplicaError, WireError)
}


def check_call(call: object, arguments: object) -> tuple[str, dict[str, Any]]:
    """Returns the actor's method for a call, and its arguments.

    Args:
        call: a key of `CALLS`.
        arguments: by name; all of them and no others.

    Raises:
        WireError: an unknown call, or arguments that are missing, unknown or of another type.
    """
    if not isinstance(call, str) or call not in CALLS:
        raise WireError(f"there is no call {str(call)[:80]!r} to a scheduler; there are {', '.join(CALLS)}")
    method, wanted = CALLS[call]
    if not isinstance(arguments, Mapping) or set(arguments) != set(wanted):
        found = ", ".join(map(str, arguments)) if isinstance(arguments, Mapping) else type(arguments).__name__
        raise WireError(
            f"call {call!r} takes the arguments {', '.join(wanted) or 'none'}; found {found[:200] or 'none'}"
        )
    for name, kind in wanted.items():
        value = arguments[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise WireError(f"call {call!r}: argument {name} is a {type(value).__name__}")
    return method, dict(arguments)


def error_to_wire(error: RdtError) -> dict[str, str]:
    """Returns an error as it travels in JSON."""
    name = type(error).__name__
    return {"type": name if name in _CLASSES else "EngineError", "message": str(error)}


def error_from_wire(told: object) -> RdtError:
    """Returns the error that `error_to_wire` described; an EngineError for anything else."""
    if not isinstance(told, Mapping) or not isinstance(told.get("message"), str):
        return EngineError(f"an answer that says nothing: {str(told)[:400]}")
    return _CLASSES.get(str(told.get("type")), EngineError)(told["message"])
