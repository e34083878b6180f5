"""What is promised to those who use a sync group, checked from outside after every fault.

Nobody serves wrong weights: who says a version serves exactly that, and it was committed. Nobody waits for ever. Source
ranks agree on the outcome, and a success is one. Only answers of members and the coordinator's status are looked at.
"""

from __future__ import annotations

import time
from typing import Any

from rdt_core import errors
from rdt_core.errors import RdtError

from . import model
from .faults import Trial
from .summary import Summary
from .world import World

#: what engine ranks say, by name; None for dead ones
Serving = dict[str, dict[str, Any] | None]


class Broken(AssertionError):
    """A promise was broken."""


class Checks:
    """The checks of one world.

    Args:
        world: that is looked at.
        summary: counts what was checked.

    Attributes:
        versions: that were committed.
    """

    def __init__(self, world: World, summary: Summary) -> None:
        self.versions: set[int] = set()
        self._world = world
        self._summary = summary

    @property
    def version(self) -> int | None:
        """The group's version."""
        return max(self.versions, default=None)

    def outcomes(self, trial: Trial, found: list[Any], hit: set[str], limit_s: float, slack_s: float) -> None:
        """Everybody has an outcome in time, as an error of rdt's, and those who could hear it the same.

        Args:
            trial: that was run.
            found: answers of the source ranks.
            hit: members that a fault struck.
            limit_s: sum of the deadlines.
            slack_s: what the machine adds.
        """
        world = self._world
        told = {name: value for name, (_, value) in zip(world.sources, found, strict=True) if isinstance(value, dict)}
        for name, value in told.items():
            self._summary.outcomes[value["error"]] += 1
            self._summary.latest = max(self._summary.latest, value["seconds"] / limit_s)
            if getattr(value.get("report"), "version", None) is not None:
                self.versions.add(value["report"].version)
                if trial.action == "refused":
                    raise Broken(f"{name} published version {value['report'].version}, which is too low")
                self._summary.longest_s = max(self._summary.longest_s, value["seconds"])
            if value["seconds"] > limit_s + slack_s:
                raise Broken(f"{name} waited {value['seconds']:.2f} s; its deadlines allow {limit_s:.2f} s")
            if value["error"] and not issubclass(getattr(errors, value["error"], object), RdtError):
                raise Broken(f"{name} was told {value['error']}: {value['message']}")
        if "coordinator" in hit or world.lost:
            return
        heard = {
            name: value["error"] if not _is_committed(value) else "" for name, value in told.items() if name not in hit
        }
        if "" in heard.values() and any(heard.values()):
            raise Broken(f"source ranks disagree about one sync: {heard}")

    def serving(self, serving: Serving) -> None:
        """Who says that it serves a version serves exactly that, and it was committed."""
        status = self._world.status()
        if status is not None and status.version is not None:
            self.versions.add(status.version)
        for replica, names in self._world.replicas.items():
            said = set()
            for rank, name in enumerate(names):
                one = serving.get(name)
                if one is None:
                    continue
                version, refusal = one["version"], one["refusal"]
                if version is None:
                    # who lost its group may go on with what it had, as long as that is one version in whole
                    whole = {model.expected(rank, len(names), known) for known in (None, *self.versions)}
                    if refusal is None and one["digest"] not in whole:
                        raise Broken(f"{name} says no version and serves weights that were never committed")
                    continue
                said.add(version)
                if refusal is not None:
                    raise Broken(f"{name} says that it serves version {version} and refuses to: {refusal}")
                self._summary.checked += 1
                if one["digest"] != model.expected(rank, len(names), version):
                    raise Broken(f"{name} says version {version} and serves other weights")
                if status is not None and version not in self.versions:
                    raise Broken(f"{name} serves version {version}; committed were {sorted(self.versions)}")
            if len(said) > 1:
                raise Broken(f"engine ranks of {replica} serve versions {sorted(said)}")

    def paused(self, serving: Serving) -> None:
        """Who paused for a sync that could not begin goes on, or is known to stand still, and holds what it held."""
        world = self._world
        standing = {
            replica: [(name, one) for name in names if (one := serving.get(name)) is not None and one["ahead"]]
            for replica, names in world.replicas.items()
        }
        for name, one in (each for some in standing.values() for each in some):
            self._summary.ahead += 1
            if one["refusal"] is not None:
                raise Broken(f"{name} only paused ahead of a sync, and is torn: {one['refusal']}")
        if not world.is_alive("source0"):
            return
        ((ok, known),) = world.answers([world.ask("source0", "known")], world.calm_s)
        if not ok or "attached" not in known:
            return  # it did not join
        for replica, some in standing.items():
            if not some or replica not in known["attached"]:
                continue
            names = [name for name, _ in some]
            if replica not in known["doubted"]:
                raise Broken(f"{names} stand still for a sync that could not begin, and rank 0 takes them for serving")
            if not any(repr(replica) in text for text in known["warned"]):
                raise Broken(f"{names} stand still for a sync that could not begin, and nobody was warned: {known}")

    def success(self, trial: Trial, found: list[Any], hit: set[str], serving: Serving) -> None:
        """A success is one: every byte accounted for, everybody who is named serves the version, the others are named."""
        world = self._world
        status = world.status()
        reports = {
            name: value["report"]
            for name, (_, value) in zip(world.sources, found, strict=True)
            if isinstance(value, dict) and getattr(value.get("report"), "version", None) is not None
        }
        for name, report in reports.items():
            if status is not None and not world.lost and (status.version or 0) < report.version:
                raise Broken(f"{name} was told that version {report.version} is committed, which it is not")
            accounts = {one.reader: one for one in report.readers}
            for replica in report.replicas:
                for reader in world.replicas[replica]:
                    account = accounts.get(reader)
                    if account is None or account.bytes != account.expected_bytes:
                        raise Broken(
                            f"version {report.version} was committed without an account of {reader}: {account}"
                        )
            missing = world.replicas.keys() - set(report.replicas) - report.failed.keys()
            if missing and trial.action in ("publish", "move", "coordinator"):
                raise Broken(f"the report of version {report.version} says nothing about {sorted(missing)}")
            if report.failed and trial.setup.policy == "require_all":
                raise Broken(f"version {report.version} was committed without {report.failed}")
        report = reports.get("source0")
        if report is None or "source0" in hit:
            return
        for replica in report.replicas:
            readers = world.replicas[replica]
            late = [
                reader for reader in readers
                if (one := serving.get(reader)) is None or one["version"] != report.version or one["is_paused"]
            ]  # fmt: skip
            if late and not hit & set(readers):
                raise Broken(f"version {report.version} was published, and {[(one, serving.get(one)) for one in late]}")

    def idle(self, trial: Trial, slack_s: float) -> None:
        """No sync runs for ever once nobody cares for it."""
        world = self._world
        # three deadlines of its begin, which is up to three of the group's where rank 0 had to mend something first
        begins = 1 if trial.action == "publish" and len(trial.faults) == 1 else 3
        end = time.monotonic() + 3 * begins * world.timeout_s + slack_s
        while (status := world.status()) is not None and status.sync is not None:
            if time.monotonic() > end:
                raise Broken(
                    f"sync {status.sync} of version {status.sync_version} still runs, and nobody takes part in it"
                )
            time.sleep(0.02)

    def everybody(self, serving: Serving, *, may_pause: bool = False) -> None:
        """Every engine rank serves the last version.

        Args:
            serving: what they say.
            may_pause: a predecessor that is in the middle of a sync may pause an engine until the next one.
        """
        self.serving(serving)
        for name in self._world.workers:
            one = serving.get(name)
            if one is None or one["version"] != self._world.version or (one["is_paused"] and not may_pause):
                raise Broken(f"{name} serves {one} instead of version {self._world.version}")


def _is_committed(value: dict[str, Any]) -> bool:
    """Whether an outcome says that the version is committed, although a replica could not be stamped or resumed."""
    return value["error"] == "EngineError" and "is committed, but not every replica took it" in value["message"]
