"""The outcome of every sync for whoever wants to know: observers are told once for each, committed or failed.

An observer is any function of one `SyncOutcome`. It is called on source rank 0, after the replicas serve again, or after the
sync failed. `JsonLines` writes a file, `print_table` a table; Ray's metrics are in `metrics`. An observer that fails is
logged once and never breaks a sync.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from . import wire
from .errors import RdtError, text_of
from .report import by_kind, one_line, rate, slow_links, slowest, sync_table
from .timeline import Recorder

log = logging.getLogger(__name__)

_WIDTH = 160
_LINE = 500
_SHOWN = 5


class SyncOutcome(wire.Struct, frozen=True):
    """What became of one sync, as source rank 0 saw it.

    Attributes:
        time: Unix time of its end, by the clock of source rank 0's host.
        group: name of the group.
        version: that was published.
        mode: publish mode of source rank 0.
        outcome: "committed"; "partial" if replicas were left out; or "failed".
        seconds: from the call of `publish` to its end.
        bytes: that were moved; 0 if it failed.
        gbps: GB/s over the report's seconds; None if it failed.
        kinds: bytes, seconds of the slowest link and GB/s by link kind.
        slowest: the link that had bytes in flight for the longest time.
        slow: links that are too slow, each in words.
        replicas: state by name: "serving", "torn", "absent" (not connected, or left out of this sync), or as in
            `wire.ReplicaStatus`. Without those whose state is not known.
        error: message of a sync that failed; empty.
        error_kind: its class.
        report: of a sync that was committed, with every link.
        timeline: of the driver and source rank 0.
    """

    time: float
    group: str
    version: int
    mode: str
    outcome: str
    seconds: float
    bytes: int = 0
    gbps: float | None = None
    kinds: dict[str, dict[str, float | None]] = msgspec.field(default_factory=dict)
    slowest: wire.LinkReport | None = None
    slow: tuple[str, ...] = ()
    replicas: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    error_kind: str = ""
    report: wire.SyncReport | None = None
    timeline: wire.Timeline | None = None


#: What is told of every sync.
Observer: TypeAlias = Callable[[SyncOutcome], None]


@dataclass(slots=True)
class Watched:
    """A sync that runs. Whoever runs it fills in the report."""

    timeline: Recorder = field(default_factory=Recorder)
    report: wire.SyncReport | None = None


class Watch:
    """Tells observers of every sync that runs inside `sync`.

    Args:
        observers: told in this order; None: this is not source rank 0, and nobody is told, nor the log of failures.
        group: name of the group.
    """

    def __init__(self, observers: Sequence[Observer] | None, group: str) -> None:
        self._observers = tuple(observers or ())
        self._is_silent = observers is None
        self._group = group
        self._failed: set[int] = set()

    @contextmanager
    def sync(self, version: int, mode: str, states: Callable[[], Mapping[str, str]]) -> Iterator[Watched]:
        """One sync. Tells what became of it, also when it fails; its error goes on as it is.

        Args:
            version: that is published.
            mode: publish mode.
            states: asks for the state of every replica; only called where the report does not say it.
        """
        watched = Watched()
        try:
            yield watched
        except Exception as error:
            seconds = time.perf_counter() - watched.timeline.began
            if not self._is_silent:
                told = one_line(text_of(error), _LINE)
                log.warning("version %d of %r failed after %.3f s: %s", version, self._group, seconds, told)
            self._tell(partial(self._failure, watched, version, mode, states, seconds, error))
            raise
        seconds = time.perf_counter() - watched.timeline.began
        if watched.report is not None:
            report = watched.report
            self._tell(partial(self._success, watched, report, states, seconds))

    def _tell(self, make: Callable[[], SyncOutcome]) -> None:
        if not self._observers:
            return
        try:
            outcome = make()
        except Exception as error:
            # the replicas serve by now, or a sync has failed for another reason: neither changes for the sake of a report
            log.warning("group %r: what became of a sync cannot be told to observers: %r", self._group, error)
            return
        for number, observer in enumerate(self._observers):
            try:
                observer(outcome)
            except Exception as error:
                if number not in self._failed:
                    self._failed.add(number)
                    log.warning(
                        "group %r: observer %r failed (%r); it is told of later syncs all the same, and this is not said again",
                        self._group, observer, error,
                    )  # fmt: skip

    def _failure(
        self,
        watched: Watched,
        version: int,
        mode: str,
        states: Callable[[], Mapping[str, str]],
        seconds: float,
        error: Exception,
    ) -> SyncOutcome:
        return SyncOutcome(
            time=time.time(),
            group=self._group,
            version=version,
            mode=mode,
            outcome="failed",
            seconds=seconds,
            replicas=self._ask(states),
            error=text_of(error),
            error_kind=type(error).__name__,
            timeline=watched.timeline.timeline("driver"),
        )

    def _success(
        self, watched: Watched, report: wire.SyncReport, states: Callable[[], Mapping[str, str]], seconds: float
    ) -> SyncOutcome:
        return SyncOutcome(
            time=time.time(),
            group=self._group,
            version=report.version,
            mode=report.mode,
            outcome="partial" if report.failed else "committed",
            seconds=seconds,
            bytes=report.bytes,
            gbps=_finite(rate(report.bytes, report.seconds)),
            kinds={
                kind: {"bytes": one.bytes, "seconds": one.seconds, "gbps": _finite(rate(one.bytes, one.seconds))}
                for kind, one in by_kind(report).items()
            },
            slowest=slowest(report),
            slow=tuple(slow_links(report)),
            replicas=self._replicas(report, states),
            report=report,
            timeline=watched.timeline.timeline("driver"),
        )

    def _replicas(self, report: wire.SyncReport, states: Callable[[], Mapping[str, str]]) -> dict[str, str]:
        served = dict.fromkeys(report.replicas, "serving")
        if not report.failed:
            return served
        # one that was left out may serve an older version, or have died before it was told anything
        out = {name: "torn" if state == "torn" else "absent" for name, state in self._ask(states).items()}
        return {**out, **served}

    def _ask(self, states: Callable[[], Mapping[str, str]]) -> dict[str, str]:
        try:
            return dict(states())
        except Exception as error:
            log.debug("group %r: the coordinator does not say how the replicas are: %s", self._group, error)
            return {}


class JsonLines:
    """Appends a line of JSON to a file for every sync, committed or failed. A disk that is full costs a warning, no sync.

    A line that was cut, by such a disk or by the end of a process, stays cut; the next one begins on a line of its own.

    Args:
        path: of the file; folders above it are made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._is_warned = False

    def __repr__(self) -> str:
        return f"JsonLines({str(self.path)!r})"

    def __call__(self, outcome: SyncOutcome) -> None:
        """Appends one line."""
        line = msgspec.json.encode(outcome) + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # one write, so that a reader sees whole lines; opened anew, so that the file may be rotated away
            with open(self.path, "ab", buffering=0) as file:
                rest = memoryview(line if _is_whole(self.path, file.fileno()) else b"\n" + line)
                while rest:
                    # a disk that becomes full takes a part without an error, and says so only when it is asked again
                    taken = file.write(rest)
                    if not taken:
                        raise OSError(errno.EIO, "nothing of a line was taken")
                    rest = rest[taken:]
        except OSError as error:
            if not self._is_warned:
                log.warning(
                    "reports of syncs cannot be written to %s, and are lost until they can: %s", self.path, error
                )
            self._is_warned = True
        else:
            self._is_warned = False


def print_table(outcome: SyncOutcome) -> None:
    """Prints a table of one sync to standard error: its phases, every engine rank's, and the slowest links."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=_WIDTH)
    if outcome.report is None:
        console.print(f"version {outcome.version} of {outcome.group!r} failed: {outcome.error}", markup=False)
    else:
        console.print(sync_table(outcome.report))


def read_outcomes(path: str | os.PathLike[str]) -> list[SyncOutcome]:
    """Reads what `JsonLines` wrote.

    Lines that are not whole (of a process that was killed while it wrote, of a disk that was full) are left out with a
    warning.

    Raises:
        RdtError: the file cannot be read, a line says something else, or no line of several is whole.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise RdtError(f"reports of syncs cannot be read from {path}: {error}") from error
    decoder = msgspec.json.Decoder(SyncOutcome)
    found: list[SyncOutcome] = []
    cut: list[int] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(decoder.decode(line))
        except msgspec.ValidationError as error:
            raise RdtError(
                f"line {number} of {path} is no outcome of a sync ({error}); expected a file that JsonLines wrote"
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError):
            cut.append(number)
    if len(cut) > 1 and not found:
        raise RdtError(
            f"none of {len(cut)} lines of {path} is an outcome of a sync; expected a file that JsonLines wrote"
        )
    if cut:
        shown = ", ".join(map(str, cut[:_SHOWN])) + ", …" * (len(cut) > _SHOWN)
        log.warning("%s: %d of its lines are not whole and are left out: line %s", path, len(cut), shown)
    return found


def _is_whole(path: Path, descriptor: int) -> bool:
    """Whether a file that is open for writing is none that can be cut, is empty, or ends in a whole line."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return True
    try:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:
        # it may be written and not read; an empty line does no harm
        return False


def _finite(value: float) -> float | None:
    return value if value != float("inf") else None
