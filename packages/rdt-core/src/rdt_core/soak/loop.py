"""The soak itself: syncs one after the other, everything measured after each, judged at the end.

Every version is checked on every worker. The first failure ends the soak as the error that it is; nothing is retried.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

from ..errors import DeadlineError, SyncError
from ..localcluster import cluster
from .actors import SoakRank, SoakWorker
from .judge import LIMITS, Verdict, judge
from .options import SoakOptions
from .probe import FIELDS, Held, measure, processes


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak found.

    Attributes:
        syncs: that were done.
        mode: publish mode.
        links: kinds of links that were in use.
        rejoins: times that the source ranks left and joined again.
        reattaches: times that the replica was attached again without that.
        seconds: of the whole loop.
        verdicts: by process and measure.
        series: the values behind them: process -> measure -> a value for each sync.
    """

    syncs: int
    mode: str
    links: tuple[str, ...]
    rejoins: int
    reattaches: int
    seconds: float
    verdicts: tuple[Verdict, ...]
    series: dict[str, dict[str, list[float]]]

    @property
    def growing(self) -> tuple[Verdict, ...]:
        """Those that are not flat."""
        return tuple(verdict for verdict in self.verdicts if verdict.grows)


def run(options: SoakOptions, observe: Callable[[int], None] = lambda done: None) -> SoakReport:
    """Starts a Ray cluster, soaks, and ends it.

    Args:
        options: checked.
        observe: called after each sync with the number that are done.

    Raises:
        SyncError: a sync failed, or a worker serves other values than the version that it says.
        DeadlineError: a process did not answer.
    """
    with cluster(cpus=2 + options.ranks + options.workers):
        return _Soak(options).run(observe)


class _Soak:
    def __init__(self, options: SoakOptions) -> None:
        import ray

        self.options = options
        # Ray keeps a record of every task in its GCS, up to some 100,000: that would be taken for growth
        make = {"num_cpus": 0, "max_concurrency": 2, "enable_tensor_transport": True, "enable_task_events": False}
        self.ranks = [ray.remote(SoakRank).options(**make).remote(rank, options) for rank in range(options.ranks)]
        self.workers = [ray.remote(SoakWorker).options(**make).remote(rank, options) for rank in range(options.workers)]
        self.series: dict[str, dict[str, list[float]]] = {}
        self.mode, self.links = "", set[str]()
        self.rejoins = self.reattaches = 0
        self._seen: dict[str, int] = {}
        # what is there now is looked at by no collection later: each would take longer than a sync
        gc.collect()
        gc.freeze()

    def _get(self, refs: list[Any], what: str) -> list[Any]:
        import ray

        limit_s = 3 * self.options.timeout_s
        try:
            return ray.get(refs, timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(f"soak: no answer to {what} within {limit_s:g} s") from None
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else SyncError(f"soak: {what}: {error}") from error

    def _join(self) -> None:
        # another name each time: the coordinator of the one before may still be ending
        group = f"soak-{self.rejoins}"
        self.mode = self._get([rank.join.remote(group) for rank in self.ranks], "join")[0]
        self._get([self.ranks[0].attach.remote(self.workers)], "attach")

    def _leave(self) -> None:
        self._detach()
        # rank 0's process keeps the coordinator, so it leaves last
        for rank in reversed(self.ranks):
            self._get([rank.leave.remote()], "leave")

    def _detach(self) -> None:
        self._get([self.ranks[0].detach.remote()], "detach")
        self._get([worker.close.remote() for worker in self.workers], "close")

    def run(self, observe: Callable[[int], None]) -> SoakReport:
        one, began = self.options, time.perf_counter()
        self._join()
        for version in range(1, one.syncs + 1):
            if version > 1 and one.rejoin_every and (version - 1) % one.rejoin_every == 0:
                self.rejoins += 1
                self._leave()
                self._join()
            elif version > 1 and one.reattach_every and (version - 1) % one.reattach_every == 0:
                self.reattaches += 1
                self._detach()
                self._get([self.ranks[0].attach.remote(self.workers)], "attach")
            results = self._get([rank.publish.remote(version) for rank in self.ranks], f"publish {version}")
            self._check(version)
            self.links.update(*(kinds for _, kinds in results))
            self._note("source 0", {"seconds": results[0][0]})
            self._measure()
            observe(version)
        self._leave()
        return SoakReport(
            syncs=one.syncs, mode=self.mode, links=tuple(sorted(self.links)), rejoins=self.rejoins,
            reattaches=self.reattaches, seconds=time.perf_counter() - began, verdicts=self._verdicts(), series=self.series,
        )  # fmt: skip

    def _check(self, version: int) -> None:
        for number, values in enumerate(self._get([w.serves.remote() for w in self.workers], "serves")):
            if values != {float(version)}:
                raise SyncError(f"worker {number} says version {version} and serves the values {sorted(values)}")

    def _measure(self) -> None:
        handles = {f"source {rank}": handle for rank, handle in enumerate(self.ranks)}
        handles |= {f"engine {rank}": handle for rank, handle in enumerate(self.workers)}
        held: dict[str, Held] = dict(
            zip(handles, self._get([handle.held.remote() for handle in handles.values()], "held"), strict=True)
        )
        held["driver"] = measure()
        try:
            held.update({name: measure(pid) for name, pid in self._seen.items()})
        except (psutil.NoSuchProcess, FileNotFoundError):  # a coordinator ends with its group
            self._seen.clear()
        if not self._seen:
            self._seen = processes()
            held.update({name: measure(pid) for name, pid in self._seen.items()})
        for name, one in held.items():
            self._note(name, msgspec.structs.asdict(one))

    def _note(self, process: str, values: dict[str, float]) -> None:
        mine = self.series.setdefault(process, {})
        for name, value in values.items():
            mine.setdefault(name, []).append(value)

    def _verdicts(self) -> tuple[Verdict, ...]:
        return tuple(
            judge(process, name, values)
            for process, measures in self.series.items()
            for name, values in measures.items()
            if name in LIMITS and len(values) >= 4 and (any(values) or name not in FIELDS)
        )
