"""The engines that the demo can drive, found by entry point, and what each must offer.

An adapter package names a function in the group `rdt.demo_engines`; it is imported only when its engine was asked for,
so that this package never imports an engine. The function has the signature of `EngineStarter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Protocol, cast

from ..engines import EngineClient
from ..errors import DeadlineError, EngineError
from ..servers import Generation

GROUP = "rdt.demo_engines"
LOGS = "its log is the newest worker-*.err of the Ray session, by default in /tmp/ray/session_latest/logs"


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine generated for a prompt: token ids (with the stop token, if any) and their log-probabilities.

    `logprobs[i]` is the natural logarithm of the probability that the model itself gave to `tokens[i]`, before any
    temperature or truncation. `versions` are the weight versions that the engine says it sampled these tokens with
    (None: those before the first sync); empty where it says nothing.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: frozenset[int | None] = frozenset()

    @classmethod
    def of(cls, sample: Generation) -> Completion:
        """What a server's sample says; a version that is no number is that before the first sync."""
        versions = frozenset(int(text) if text.isdecimal() else None for text in sample.versions)
        return cls(tokens=sample.token_ids, logprobs=sample.logprobs, versions=versions)


class RolloutEngine(Protocol):
    """One running replica of an engine, as the demo uses it. Every call ends by its `timeout_s` or raises."""

    name: str  # engine and version, for reports
    client: EngineClient  # what a sync drives; can be pickled to another process of the cluster

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        samples: int,
        max_tokens: int,
        stop: Sequence[int],
        seed: int,
        timeout_s: float,
    ) -> list[list[Completion]]:
        """Samples at temperature 1 from the full distribution: for each prompt `samples` completions.

        Raises:
            EngineError: the engine failed or refused.
            DeadlineError: not done within `timeout_s` seconds.
        """
        ...

    def version(self, *, timeout_s: float) -> int | None:
        """The version that the engine says it serves, or None before the first sync."""
        ...

    def shutdown(self) -> None:
        """Ends every process of the engine. Idempotent; never raises for an engine that is dead already."""
        ...


class EngineStarter(Protocol):
    """Starts a replica in the Ray cluster that this process is connected to, and returns when it can generate."""

    def __call__(
        self, model_dir: Path, *, tp: int, dtype: str, max_model_len: int, seed: int, threads: int, timeout_s: float
    ) -> RolloutEngine:
        """Starts the engine; one that does not come up is left to the end of the cluster.

        Raises:
            EngineError: it did not start.
            DeadlineError: not up within `timeout_s` seconds.
        """
        ...


def answers(refs: list[Any], engine: str, what: str, timeout_s: float) -> list[Any]:
    """Waits for what an engine's actor was asked.

    Args:
        refs: of Ray.
        engine: its name, for errors.
        what: it was asked to do, for errors.
        timeout_s: deadline, in seconds.

    Raises:
        DeadlineError: not done within `timeout_s`.
        EngineError: the engine failed or died.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    try:
        return list(ray.get(refs, timeout=timeout_s))
    except GetTimeoutError as error:
        raise DeadlineError(f"{engine} did not {what} within {timeout_s:.0f} s") from error
    except RayError as error:
        cause = getattr(error, "cause", None) or error
        # an engine's subprocess writes its reason to the actor's log, and gives only its end to the caller
        raise EngineError(f"{engine} failed to {what}: {type(cause).__name__}: {cause} ({LOGS})") from error


def installed_engines() -> dict[str, EntryPoint]:
    """Returns the entry points of the group by engine name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def load_engine(name: str) -> EngineStarter:
    """Imports the starter of one engine.

    Raises:
        EngineError: there is no such engine, or importing its adapter failed.
    """
    points = installed_engines()
    if name not in points:
        raise EngineError(f"no engine {name!r} is installed; installed: {', '.join(sorted(points)) or 'none'}")
    try:
        return cast(EngineStarter, points[name].load())
    except ImportError as error:
        raise EngineError(
            f"the adapter of engine {name!r} ({points[name].value}) cannot be imported: {error}"
        ) from error
