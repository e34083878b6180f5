"""A sync group of real processes that can be hurt, observed and healed: coordinator, source ranks, replicas.

The owner forks the members, sends them commands and reads their answers. It does what Ray and an operator do in earnest:
the coordinator ends with source rank 0 and is made again when rank 0 asks; dead ranks are started again and take over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rdt_core.errors import CoordinatorLostError
from rdt_core.wire import GroupStatus

from .channel import receive, send
from .control import SocketControl
from .faults import LATE, ZOMBIE, Fault, Setup
from .members import GROUP
from .nursery import Child, Nursery
from .points import Injector

#: deadlines while nothing is injected, in seconds: only a deadlock reaches them
CALM_S = 20.0
_HANDLES = resource.getrlimit(resource.RLIMIT_NOFILE)
_OPTIONS = {"bucket_bytes": 20_000, "lookahead": 1}


class Unanswered(AssertionError):
    """A member did not answer a command in time."""


class World:
    """One group. A context manager; its processes end with it.

    Args:
        nursery: where members are forked.
        setup: what it is made of.
        timeout_s: deadline of every wait while faults are injected.
        calm_s: while none are.
        mutation: a mechanism that is switched off; see `mutations`.

    Attributes:
        version: the last one that somebody tried to publish.
        struck: faults of the present trial that happened, by number.
        zombies: processes that were replaced and are still stopped.
        lost: whether a coordinator died since faults were armed.
        forked: members that were forked since then.
        ever: numbers of all source ranks' and engine ranks' processes.
    """

    def __init__(
        self, nursery: Nursery, setup: Setup, *, timeout_s: float = 0.8, calm_s: float = CALM_S, mutation: str = ""
    ) -> None:
        self.setup = setup
        self.calm_s = calm_s
        self.timeout_s = timeout_s
        self.grace_s = 0.3 * timeout_s
        self.version = 0
        self.struck: dict[int, float] = {}
        self.zombies: list[Child] = []
        self.lost = False
        self.forked: set[str] = set()
        self.ever: list[int] = []
        self._nursery = nursery
        self._mutation = mutation
        self._folder = Path(tempfile.mkdtemp(prefix="rdt-faults-"))
        self._path = str(self._folder / "c")
        self._members: dict[str, Child] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._asked: dict[int, Child] = {}
        self._ready: set[int] = set()
        self._faults: Sequence[Fault] = ()
        self._stopped: dict[str, float] = {}  # when to go on, by member
        self._calm = True
        self._control = self._open()

    def _open(self) -> SocketControl:
        return SocketControl(
            GROUP, self._path, Injector("owner", lambda _: None), call_timeout_s=self.calm_s, grace_s=1.0
        )

    # --- names

    @property
    def sources(self) -> list[str]:
        """Names of the source ranks."""
        return [f"source{rank}" for rank in range(self.setup.sources)]

    @property
    def replicas(self) -> dict[str, list[str]]:
        """Names of the engine ranks, by replica."""
        return {
            f"replica{number}": [f"replica{number}/{rank}" for rank in range(ranks)]
            for number, ranks in enumerate(self.setup.replicas)
        }

    @property
    def workers(self) -> list[str]:
        """Names of all engine ranks."""
        return [name for names in self.replicas.values() for name in names]

    @property
    def pids(self) -> list[int]:
        """Of all processes that live."""
        return [child.pid for child in (*self._members.values(), *self.zombies) if child.is_alive]

    def is_alive(self, name: str) -> bool:
        """Whether a member's process lives (stopped or not) and was not given up as a zombie."""
        return name in self._members and self._members[name].is_alive

    # --- life

    def start(self) -> None:
        """Forks everybody, joins, attaches every replica and publishes a first version."""
        self.fork_coordinator()
        for name in (*self.sources, *self.workers):
            self.fork(name)
        began = [self.ask(name, "start", self.version, {}) for name in self.sources]
        self.answers(began, self.calm_s)
        for replica in self.replicas:
            self.expect(self.answers([self.ask("source0", "attach", replica)], self.calm_s))
        self.expect(self.publish())

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every process."""
        for child in (*self._members.values(), *self.zombies):
            child.end()
        self._members.clear()
        self.zombies.clear()
        self._control.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fork(self, name: str) -> None:
        """Forks a source rank or an engine rank; a living one of this name is ended."""
        if name in self._members:
            self._members.pop(name).end()
            if name == "source0" and "coordinator" in self._members:
                self.kill_coordinator()  # it lives with rank 0
        self._stopped.pop(name, None)
        self.forked.add(name)
        timeout_s = self.calm_s if self._calm else self.timeout_s
        common = {"path": self._path, "timeout_s": timeout_s, "grace_s": self.grace_s, "mutation": self._mutation}
        if name.startswith("source"):
            paths = {replica: tuple(self._own(one) for one in names) for replica, names in self.replicas.items()}
            child = self._nursery.fork(
                name, "source", rank=int(name.removeprefix("source")), setup=self.setup, replicas=paths, options=_OPTIONS,
                **common,
            )  # fmt: skip
        else:
            replica, _, rank = name.rpartition("/")
            own = self._own(name)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(own)
            child = self._nursery.fork(
                name,
                "worker",
                replica=replica,
                rank=int(rank),
                world_size=len(self.replicas[replica]),
                own=own,
                **common,
            )
        self._members[name] = child
        self.ever.append(child.pid)
        self._await_ready(child)

    def fork_coordinator(self) -> None:
        """Forks the coordinator."""
        if "coordinator" in self._members:
            self._members.pop("coordinator").end()
        self._stopped.pop("coordinator", None)
        child = self._nursery.fork(
            "coordinator", "coordinator", path=self._path, world_size=self.setup.sources, stall_s=self.timeout_s,
            mutation=self._mutation,
        )  # fmt: skip
        self._members["coordinator"] = child
        self._await_ready(child)

    def _own(self, worker: str) -> str:
        return str(self._folder / worker.replace("/", "."))

    def _await_ready(self, child: Child) -> None:
        deadline = time.monotonic() + self.calm_s
        while child.pid not in self._ready:
            if not child.is_alive or time.monotonic() > deadline:
                raise Unanswered(f"{child.name} did not start")
            self._pump(0.5)

    # --- commands

    def ask(self, name: str, method: str, *args: Any) -> int:
        """Sends a command to a member; returns its number. A dead member never answers."""
        number = next(self._numbers)
        child = self._members.get(name)
        if child is not None:
            self._asked[number] = child
            with contextlib.suppress(OSError):
                send(child.sock, (number, method, args))
        return number

    def ask_child(self, child: Child, method: str, *args: Any) -> int:
        """Sends a command to a process that is no member any more."""
        number = next(self._numbers)
        self._asked[number] = child
        send(child.sock, (number, method, args))
        return number

    def keep(self, name: str) -> None:
        """The process of a member stays although another will take its place."""
        self.zombies.append(self._members.pop(name))

    def answers(self, numbers: Iterable[int], limit_s: float, patient: bool = False) -> list[Any]:
        """Returns the answers to commands, None for members that died or became zombies.

        Args:
            numbers: of the commands.
            limit_s: seconds for all of them; stopped members get as much again once they go on.
            patient: return None for a member that does not answer, instead of raising.

        Raises:
            Unanswered: names the members that live and did not answer.
        """
        numbers = list(numbers)
        deadline = time.monotonic() + limit_s
        released = False
        while True:
            late = [
                number for number in numbers
                if number not in self._answers and number in self._asked and self._asked[number].is_alive
                and not self._is_zombie(self._asked[number])
            ]  # fmt: skip
            waiting = [number for number in late if self._stopped.get(self._asked[number].name) not in (LATE, ZOMBIE)]
            if not waiting and late and not released:
                # the others have their outcome: those that were stopped go on, or are left for dead
                released = True
                self.release()
                deadline = time.monotonic() + limit_s
                continue
            if not late:
                self._pump(0)
                return [self._answers.get(number, (False, None)) for number in numbers]
            if time.monotonic() > deadline:
                if patient:
                    return [self._answers.get(number, (False, None)) for number in numbers]
                names = ", ".join(self._asked[number].name for number in late)
                raise Unanswered(f"{names} did not answer within {limit_s:.1f} s")
            self._pump(min(0.05, max(0.0, deadline - time.monotonic())))

    def _is_zombie(self, child: Child) -> bool:
        return child in self.zombies and child.is_stopped

    def release(self) -> None:
        """Lets members that were stopped until the others have their outcome go on; gives up those that shall be zombies."""
        for name, when in list(self._stopped.items()):
            if when == ZOMBIE and name != "coordinator":
                child = self._members.pop(name)
                child.wait_stopped()
                self.zombies.append(child)
                del self._stopped[name]
            elif when <= LATE:
                self._go_on(name)

    def _go_on(self, name: str) -> None:
        del self._stopped[name]
        child = self._members[name]
        child.wait_stopped()
        child.signal(signal.SIGCONT)

    def _pump(self, timeout_s: float) -> None:
        """Reads what members say, lets those go on whose time has come, and does what Ray does about dead ones."""
        now = time.monotonic()
        for name, when in list(self._stopped.items()):
            if LATE < when <= now:
                self._go_on(name)
        if self._stopped:
            timeout_s = min(timeout_s, 0.02)
        socks = {child.sock: child for child in (*self._members.values(), *self.zombies) if child.sock.fileno() >= 0}
        wanted = False
        for sock in select.select(list(socks), [], [], timeout_s)[0]:
            child = socks[sock]
            try:
                what, number, value = receive(sock)
            except (EOFError, OSError):
                sock.close()
                continue
            if what == "ready":
                self._ready.add(child.pid)
            elif what == "struck":
                self._strike(child, number)
            elif what == "done":
                self._answers[number] = value
            elif what == "wanted":
                wanted = True
        if wanted and not self.is_alive("coordinator"):
            self.fork_coordinator()
        coordinator = self._members.get("coordinator")
        first = self._members.get("source0")
        if coordinator is not None and first is not None and not first.is_alive and coordinator.is_alive:
            self.kill_coordinator()  # it lives with rank 0
        elif coordinator is not None and not coordinator.is_alive:
            self.lost = True

    def _strike(self, child: Child, number: int) -> None:
        if child in self.zombies:
            return
        fault = self._faults[number]
        self.struck[number] = time.monotonic()
        if fault.kind == "stop":
            self._stopped[child.name] = time.monotonic() + fault.value if fault.value > 0 else fault.value

    # --- what a group does

    def arm(self, faults: Sequence[Fault], is_calm: bool = False) -> None:
        """Arms faults in every member, and shortens every deadline unless `is_calm`; `calm` is the way back."""
        self._faults = faults
        self.struck = {}
        self.lost = False
        self.forked.clear()
        if not is_calm:
            self._calm = False
            self._limit(self.timeout_s, self.grace_s)
        self.answers([self.ask(name, "arm", list(faults)) for name in self._members], self.calm_s)

    def rearm(self, name: str) -> None:
        """Arms the present trial's faults in a member that was forked meanwhile."""
        self.answers([self.ask(name, "arm", list(self._faults))], self.calm_s)

    def lift(self, name: str) -> None:
        """A member may open files again."""
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._members[name].pid, resource.RLIMIT_NOFILE, _HANDLES)

    def kill_coordinator(self) -> None:
        """Ends the coordinator; rank 0 will ask for another."""
        self._members.pop("coordinator").end()
        self._stopped.pop("coordinator", None)
        self.lost = True

    def calm(self) -> None:
        """Disarms, lifts limits and lengthens deadlines in everybody who lives."""
        self._calm = True
        for name in list(self._stopped):
            self._stopped[name] = LATE if self._stopped[name] != ZOMBIE else ZOMBIE
        self.release()
        for name in self._members:
            self.lift(name)
        self.answers([self.ask(name, "arm", []) for name in self._members], self.calm_s)
        self._limit(self.calm_s, 2.0)

    def _limit(self, timeout_s: float, grace_s: float) -> None:
        names = [name for name in self._members if name != "coordinator"]
        self.answers([self.ask(name, "limit", timeout_s, grace_s) for name in names], self.calm_s)

    def passed(self) -> dict[str, dict[str, int]]:
        """Returns how often each member passed each phase since `arm`."""
        names = list(self._members)
        found = self.answers([self.ask(name, "passed") for name in names], self.calm_s)
        return {name: value for name, (ok, value) in zip(names, found, strict=True) if ok}

    def publish(self, limit_s: float | None = None) -> list[Any]:
        """Publishes the next version on every source rank."""
        self.version += 1
        asked = [self.ask(name, "publish", self.version) for name in self.sources]
        return self.answers(asked, 4 * self.calm_s if limit_s is None else limit_s)

    def serving(self, limit_s: float) -> dict[str, dict[str, Any] | None]:
        """Returns what each engine rank says that it serves; None for dead ones.

        Raises:
            Unanswered: one lives and does not answer.
        """
        names = [name for name in self.workers if self.is_alive(name)]
        found = self.answers([self.ask(name, "serving") for name in names], limit_s)
        return {name: value if ok else None for name, (ok, value) in zip(names, found, strict=True)}

    def status(self) -> GroupStatus | None:
        """Returns what the coordinator says of the group; None if there is no coordinator."""
        if not self.is_alive("coordinator"):
            return None
        self.lift("coordinator")
        for _ in range(2):
            try:
                return self._control.status()
            except CoordinatorLostError:  # this one took the place of another
                self._control.close()
                self._control = self._open()
        return None

    @staticmethod
    def expect(found: list[Any]) -> None:
        """Raises AssertionError unless every answer is a success."""
        wrong = [value for ok, value in found if not ok or (isinstance(value, dict) and value.get("error"))]
        assert not wrong, f"without a fault: {wrong}"
