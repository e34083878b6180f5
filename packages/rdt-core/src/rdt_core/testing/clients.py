"""Checks that an engine client runs to prove itself, with a living engine and a group that publishes to it.

`check_engine_client` takes a client that is attached to nothing yet, the group's rank 0, and a function that publishes on every
rank. It looks at the calls from outside: what the engine says of its version at each step, what a failed sync leaves, that the
next one heals it, and that only rdt's own errors come out. Works over Ray and in one process alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ..engines import STEPS, ConnectInfo, EngineClient, receive_of
from ..errors import EngineError, RdtError
from ..sync import WeightSync
from .comparing import refuse

_METHODS = ("connect", *STEPS, "commit", "abort", "resume", "version", "health")


def check_engine_client(
    client: EngineClient,
    sync: WeightSync,
    publish: Callable[[int], Any],
    *,
    generates: Callable[[], bool] | None = None,
    first_version: int = 1,
    timeout_s: float = 60.0,
) -> None:
    """Runs every check of an engine client. It is detached at the end, and its engine serves `first_version` + 3.

    Args:
        client: of a living engine that is in no group.
        sync: source rank 0 of a group that has published nothing above `first_version` - 1.
        publish: publishes a version on every source rank of the group, and raises what rank 0 raised.
        generates: whether the engine generates now. Without it that a torn engine refuses is not checked.
        first_version: of four versions that are published, one of which fails.
        timeout_s: of each call.

    Raises:
        ConformanceError: the client does not keep its protocol.
        RdtError: a sync failed that should not have.
    """
    check_form(client)
    watched = Watched(client, timeout_s)
    client.health(deadline=watched.deadline())
    check_late(client)
    try:
        sync.attach(watched, timeout_s=timeout_s)
        publish(first_version)
        watched.check_order(first_version)
        _serves(watched, first_version, generates, "after the first sync")
        sync.reconnect(watched, timeout_s=timeout_s)
        _serves(watched, first_version, generates, "after it was connected again without need")
        publish(first_version + 1)
        watched.check_order(first_version + 1)
        _serves(watched, first_version + 1, generates, "after the second sync")
        watched.fails = True
        try:
            publish(first_version + 2)
        except RdtError:
            pass
        else:
            refuse(f"replica {client.name!r}: a sync whose replica failed did not fail")
        finally:
            watched.fails = False
        if "abort" not in watched.calls:
            refuse(f"replica {client.name!r} was not told that its sync failed")
        found = client.version(deadline=watched.deadline())
        if found is not None:
            refuse(
                f"replica {client.name!r} says version {found} after a sync that failed",
                "abort() tears every rank that received bytes, finished or not",
            )
        if generates is not None and generates():
            refuse(f"replica {client.name!r} generates after a sync that failed", "a torn engine refuses")
        publish(first_version + 3)
        _serves(watched, first_version + 3, generates, "after the sync that followed a failed one")
        client.health(deadline=watched.deadline())
    finally:
        sync.detach(watched)


def check_form(client: Any) -> None:
    """Checks that a client has a name and every method.

    Raises:
        ConformanceError: names what is missing.
    """
    if not isinstance(getattr(client, "name", None), str) or not client.name:
        refuse(f"a {type(client).__name__} has no `name`, which is the replica's, unique in its group")
    missing = [name for name in _METHODS if not callable(getattr(client, name, None))]
    if missing:
        refuse(f"a {type(client).__name__} lacks {', '.join(missing)}", "see `rdt_core.EngineClient`")


def check_late(client: EngineClient) -> None:
    """Checks that a call whose deadline has passed is answered, or raises an error of rdt's own: a sync knows no others.

    Raises:
        ConformanceError: Ray's error comes out, or another one of what the client is made of.
    """
    for method in ("version", "health"):
        try:
            getattr(client, method)(deadline=time.monotonic() - 1.0)
        except RdtError:
            continue
        except Exception as error:  # whatever it is made of
            refuse(
                f"replica {client.name!r}: {method}() whose deadline has passed raises {type(error).__qualname__} of "
                f"{type(error).__module__}: {error}",
                "turn it into DeadlineError, and what the engine itself raises into EngineError",
            )


def _serves(watched: Watched, version: int, generates: Callable[[], bool] | None, when: str) -> None:
    found = watched.client.version(deadline=watched.deadline())
    if found != version:
        refuse(f"replica {watched.name!r} says version {found} {when}", f"{version} is expected")
    if generates is not None and not generates():
        refuse(f"replica {watched.name!r} does not generate {when}", "resume() lets it go on")


class Watched:
    """A client that remembers the calls of the last sync and what the engine said after each, and fails when told to.

    Args:
        client: whose calls they are.
        timeout_s: of each question for the version.

    Attributes:
        calls: of the last sync: step, and the version that the engine said when the step was done.
        fails: whether the last step before the commit fails, after the engine has done it.
    """

    def __init__(self, client: EngineClient, timeout_s: float) -> None:
        self.client = client
        self.name = client.name
        self.calls: dict[str, int | None] = {}
        self.fails = False
        self._timeout_s = timeout_s
        if receive_of(client) is not None:
            self.receive = self._receive

    def deadline(self) -> float:
        """Of a call that starts now."""
        return time.monotonic() + self._timeout_s

    def check_order(self, version: int) -> None:
        """Raises ConformanceError where the engine said a version before its commit, or not after it."""
        for step in ("pull", "finish", "receive"):
            found = self.calls.get(step)
            if found is not None:
                refuse(
                    f"replica {self.name!r} says version {found} after {step}() of version {version}, before its commit",
                    "from the first byte of a sync to its commit an engine says none",
                )
        if self.calls.get("commit") != version:
            refuse(
                f"replica {self.name!r} says version {self.calls.get('commit')} after commit()",
                f"{version} is expected",
            )

    def _note(self, step: str) -> None:
        self.calls[step] = self.client.version(deadline=self.deadline())

    def _fail(self) -> None:
        if self.fails:
            raise EngineError("this client was told to fail")

    def connect(self, info: ConnectInfo, *, deadline: float) -> None:
        self.client.connect(info, deadline=deadline)

    def pause(self, *, deadline: float) -> None:
        self.calls = {}
        self.client.pause(deadline=deadline)

    def begin(self, version: int, *, deadline: float) -> None:
        self.client.begin(version, deadline=deadline)

    def pull(self, version: int, *, deadline: float) -> None:
        self.client.pull(version, deadline=deadline)
        self._note("pull")

    def finish(self, version: int, *, deadline: float) -> None:
        self.client.finish(version, deadline=deadline)
        self._note("finish")
        self._fail()

    def _receive(self, version: int, *, deadline: float) -> Mapping[str, float]:
        self.calls = {}
        receive: Any = self.client.receive  # type: ignore[attr-defined]
        seconds: Mapping[str, float] = receive(version, deadline=deadline)
        self._note("receive")
        self._fail()
        return seconds

    def commit(self, version: int, *, deadline: float) -> None:
        self.client.commit(version, deadline=deadline)
        self._note("commit")

    def abort(self, version: int, reason: str, *, deadline: float) -> None:
        self.client.abort(version, reason, deadline=deadline)
        self.calls["abort"] = None

    def resume(self, *, deadline: float) -> None:
        self.client.resume(deadline=deadline)

    def version(self, *, deadline: float) -> int | None:
        return self.client.version(deadline=deadline)

    def health(self, *, deadline: float) -> None:
        self.client.health(deadline=deadline)


__all__ = ["check_engine_client", "check_form", "check_late"]
