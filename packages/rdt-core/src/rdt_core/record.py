"""One sync as the coordinator remembers it: who takes part, which rounds are published and read, and its outcome.

State without policy. A record is running until it has either a report or a failure; its gates are where members wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from . import wire
from .errors import SyncError, WireError
from .gates import Gate, member_names
from .members import Reader


@dataclass(slots=True, eq=False)
class SyncRecord:
    """One sync, from the moment that every source rank has begun it.

    Attributes:
        id: counts the group's syncs from 1.
        version: what is synced.
        rounds: number of rounds by source rank.
        replicas: names of the replicas that take part.
        readers: their engine ranks by name, as they were connected at the start.
        ended: opens at the commit.
        told: opens when every source rank has its outcome.
        reports: accounts of engine ranks.
        pulling: replicas that may have received bytes.
        failure: the first failure, empty if there was none.
        report: the `SyncReport`, empty until the commit.
        touched: event loop time of the last call.
        watchdog: ends a sync that everybody forgot.
    """

    id: int
    version: int
    rounds: Mapping[int, int]
    replicas: tuple[str, ...]
    readers: Mapping[str, Reader]
    told: Gate
    ended: Gate = field(default_factory=lambda: Gate((0,)))
    reports: dict[str, wire.ReaderReport] = field(default_factory=dict)
    pulling: set[str] = field(default_factory=set)
    failure: str = ""
    report: bytes = b""
    touched: float = 0.0
    watchdog: asyncio.TimerHandle | None = None
    _published: dict[int, Gate] = field(default_factory=dict)
    _read: dict[int, Gate] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether it has no outcome yet."""
        return not self.failure and not self.report

    @property
    def unaccounted(self) -> tuple[str, ...]:
        """Engine ranks that have not accounted for their bytes."""
        return tuple(reader for reader in self.readers if reader not in self.reports)

    def published(self, round: int) -> Gate:
        """Returns the gate that waits for each source rank which has this round. Raises WireError if none has."""
        if round not in self._published:
            self._check_round(round)
            self._published[round] = Gate(rank for rank in sorted(self.rounds) if self.rounds[rank] > round)
        return self._published[round]

    def read(self, round: int) -> Gate:
        """Returns the gate that waits for every engine rank to have read this round. Raises as `published`."""
        if round not in self._read:
            self._check_round(round)
            self._read[round] = Gate(self.readers)
        return self._read[round]

    @property
    def has_waiters(self) -> bool:
        """Whether somebody waits for this sync."""
        return any(gate.waiting for gate in self._gates())

    def end(self, *, failure: str = "", report: bytes = b"") -> None:
        """Sets the outcome and tells everybody who waits."""
        self.failure, self.report = failure, report
        if self.watchdog is not None:
            self.watchdog.cancel()
            self.watchdog = None
        if report:
            self.ended.arrive(0)
        else:
            for gate in self._gates():
                gate.wake(SyncError(failure))

    def describe_silence(self) -> str:
        """Returns what keeps this sync from its commit."""
        late = self.unaccounted
        return f"no account of the bytes from {member_names(late)}" if late else "the driver did not commit"

    def _gates(self) -> list[Gate]:
        offers = [reader.offered for reader in self.readers.values()]
        return [*self._published.values(), *self._read.values(), *offers, self.ended]

    def _check_round(self, round: int) -> None:
        rounds = max(self.rounds.values())
        if not 0 <= round < rounds:
            raise WireError(
                f"round {round} of sync {self.id} does not exist; the source ranks declared {rounds} rounds"
            )
