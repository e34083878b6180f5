"""Every error that rdt raises on purpose, in one tree below `RdtError`.

A message names the tensor, the rank, the bytes, what was found, what was expected and the way out; the class says
which kind of mistake it was, so that callers can tell a wrong set-up from a fault at run time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_DEAD = "The actor is dead because "
_RAISED = re.compile(r"[\w.]+(Error|Exception|Exit|Interrupt): ")
_SENTENCE = 180


class RdtError(Exception):
    """Base of all errors of rdt."""


class VersionError(RdtError):
    """A version of Ray, NIXL, an engine or the wire format that cannot work, or a part that is missing."""


class WireError(RdtError):
    """A message that does not decode, is too large, or declares something impossible (names, boxes, sizes)."""


class GeometryError(RdtError):
    """A view op with arguments that do not fit the shape it is applied to."""


class TracingError(RdtError):
    """A weight loader did something to a stand-in tensor that needs its data."""


class CoverageError(RdtError):
    """Tensors that an engine wants and no source rank holds, or that nobody takes, or elements without an owner."""


class SourceError(RdtError):
    """A trainer's module cannot be declared: an unmapped parameter, an unsupported layout, a shard that moved."""


class TransportError(RdtError):
    """A link could not be made, or moving bytes over it failed."""


class MembershipError(RdtError):
    """A join that contradicts the group: a rank taken twice, another world size, an unknown group."""


class TakenOverError(MembershipError):
    """Another process has taken the place of this source rank; nothing that this one does counts any more."""


class PlacementError(RdtError):
    """Ranks cannot be given GPUs as asked: too few, in the wrong places, taken, shared, or hidden from their process."""


class DeadlineError(RdtError):
    """A wait reached its deadline; says what was waited for and who had not answered."""


class SyncError(RdtError):
    """A sync failed; the message is the same on every rank and names the member and phase that failed first."""


class CoordinatorLostError(SyncError):
    """The coordinator of the group died; the next publish on every rank opens a new one and joins it."""


class TornReplicaError(SyncError):
    """A replica holds bytes of two versions and refuses to generate until a complete sync or a reload."""


class VerifyError(SyncError):
    """Bytes that landed are not those that their owner holds; names tensor, rows, source rank and engine rank."""


class EngineError(RdtError):
    """An inference engine refused or failed a control call."""


def text_of(error: object) -> str:
    """What an error says, as text that every message can carry: names of files need not be UTF-8."""
    return (str(error) or repr(error)).encode("utf-8", "backslashreplace").decode()


def death_of(error: object) -> str:
    """Why an actor of Ray died, as one sentence of at most 240 characters; Ray itself fills a page with it."""
    lines = [line for line in text_of(error).splitlines() if line.strip()]
    facts = dict(line.strip().split(": ", 1) for line in lines if line.startswith("\t") and ": " in line)
    whole = [line for line in lines if not line[0].isspace()]
    head, raised = whole[0], [line for line in whole if _RAISED.match(line)]
    cause = next((line.removeprefix(_DEAD) for line in whole if line.startswith(_DEAD)), raised[-1] if raised else head)
    sentence = cause.split(". ", 1)[0].rstrip(".")
    where = f" (pid {facts['pid']} on {facts['ip']})" if {"pid", "ip"} <= facts.keys() else ""
    return f"{sentence if len(sentence) <= _SENTENCE else sentence[: _SENTENCE - 1] + '…'}{where}"


def some(names: Iterable[str], limit: int = 8) -> str:
    """Returns the first of many names, and how many more there are, for a message."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")


class StepError(EngineError):
    """A step of a sync that an engine takes in one call failed; the steps after it did not begin.

    Args:
        message: what failed.
        step: of `engines.STEPS`.
    """

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message)
        self.step = step

    def __reduce__(self) -> Any:
        """Travels between processes with its step."""
        return StepError, (str(self), self.step)


class ConformanceError(RdtError):
    """A source, a landing or an engine client does not keep its protocol; says what it did, and what is expected."""
