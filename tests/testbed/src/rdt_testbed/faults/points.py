"""Where faults strike: an injector in each process counts the phases that it passes and acts where a fault is armed.

Real objects are wrapped from outside; the product has no hooks. A process says that a fault strikes before it does, so that
a campaign counts only faults that happened. Refuses nothing and changes nothing as long as no fault is armed.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rdt_core import memory, publisher, receiver
from rdt_core.errors import TransportError
from rdt_core.landing import ModuleLanding
from rdt_core.transport.direct import MemoryTransfer

from .faults import CORRUPT, FAIL, FILL, FLIP, MESSAGE_KINDS, Fault

_PUBLISHER = ("follow", "serve", "readable")
_RECEIVER = ("connect", "pull", "finish", "commit", "abort")
_LANDING = ("trace", "begin", "open", "close", "finish", "abort")


class InjectedError(Exception):
    """What an engine, a loader or a trainer's own code raises: nothing that rdt knows."""


class Injector:
    """The faults of one process.

    Args:
        member: that this process is.
        tell: called with the number of a fault that strikes now.
    """

    def __init__(self, member: str, tell: Callable[[int], None]) -> None:
        self.member = member
        self._tell = tell
        self._lock = threading.Lock()
        self._armed: dict[int, Fault] = {}
        self.passed: Counter[str] = Counter()

    def arm(self, faults: Sequence[Fault]) -> None:
        """Takes the faults of the next trial, numbered as given, and counts anew. Other members' are left alone."""
        with self._lock:
            self._armed = {number: fault for number, fault in enumerate(faults) if fault.member == self.member}
            self.passed = Counter()

    def take_passed(self) -> dict[str, int]:
        """Returns how often each phase was passed since `arm`."""
        with self._lock:
            return dict(self.passed)

    def at(self, phase: str, when: str = "before", count: int | None = None) -> Fault | None:
        """A phase is passed: acts on the process if a fault says so.

        Args:
            phase: of this member.
            when: "before" it or "after" it.
            count: the occurrence, for "after"; what `passing` returned.

        Returns:
            A fault that the caller must act out: of a message, of its bytes, or of what it is about to do.
        """
        with self._lock:
            if when == "before":
                self.passed[phase] += 1
                count = self.passed[phase]
            found = None
            for number, fault in self._armed.items():
                if (fault.phase, fault.when, fault.occurrence) == (phase, when, count):
                    found = number, fault
                    break
            if found is None:
                return None
            del self._armed[found[0]]
        number, fault = found
        self._tell(number)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.kind == "delay":
            time.sleep(fault.value)
        elif fault.kind == "handles":
            exhaust_handles()
        elif fault.kind == FAIL:
            raise (TransportError if phase.startswith("transfer.") else InjectedError)(
                f"{self.member} {phase}: injected"
            )
        elif fault.kind in (*MESSAGE_KINDS, CORRUPT, FILL, FLIP):
            return fault
        return None

    def passing(self, phase: str) -> int:
        """Returns the occurrence of a phase that `at` was called for last."""
        with self._lock:
            return self.passed[phase]

    def around(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `function` with the points before and after it."""

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            self.at(phase)
            count = self.passing(phase)
            result = function(*args, **options)
            self.at(phase, "after", count)
            return result

        return run


def exhaust_handles() -> None:
    """From now on this process can open nothing; whoever watches it lifts the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))


def flip(data: bytes, salt: int) -> bytes:
    """Returns `data` with one bit changed."""
    place, bit = salt % len(data), salt // len(data) % 8
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    return bytes(changed)


def corrupted(value: Any, salt: int) -> Any:
    """Returns `value` with one bit of one of the messages in it changed; as it is if it holds none."""
    messages = list(_messages(value))
    if not messages:
        return value
    chosen = messages[salt % len(messages)]
    return _replaced(value, chosen, flip(chosen, salt // len(messages)))


def _messages(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes) and value:
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _messages(one)


def _replaced(value: Any, old: bytes, new: bytes) -> Any:
    if value is old:
        return new
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(one, old, new) for one in value)
    return value


def wrap_classes(injector: Injector) -> None:
    """Puts points around what source ranks and engine ranks do, in this process."""
    for owner, room, names in (
        (publisher.Publisher, "publisher", _PUBLISHER),
        (receiver.Receiver, "receiver", _RECEIVER),
        (ModuleLanding, "landing", _LANDING),
    ):
        for name in names:
            if hasattr(owner, name):
                setattr(owner, name, injector.around(f"{room}.{name}", getattr(owner, name)))
    _wrap_rounds(injector)
    _wrap_transfers(injector)
    _wrap_memory(injector)


def _wrap_rounds(injector: Injector) -> None:
    stock = publisher.Publisher.rounds_written

    def rounds_written(self: publisher.Publisher) -> Iterator[int]:
        rounds = stock(self)
        while True:
            injector.at("publisher.write")
            count = injector.passing("publisher.write")
            number = next(rounds, None)
            if number is None:
                return
            injector.at("publisher.write", "after", count)
            yield number

    publisher.Publisher.rounds_written = rounds_written


def _wrap_transfers(injector: Injector) -> None:
    stock = MemoryTransfer.post

    def post(self: MemoryTransfer) -> None:
        fault = injector.at("transfer.post")
        count = injector.passing("transfer.post")
        stock(self)
        if fault is not None and fault.kind == FLIP:
            flip_landed(self, int(fault.value))
        injector.at("transfer.post", "after", count)

    MemoryTransfer.post = post  # type: ignore[method-assign]
    MemoryTransfer.wait = injector.around("transfer.wait", MemoryTransfer.wait)  # type: ignore[method-assign]


def flip_landed(transfer: MemoryTransfer, salt: int) -> None:
    """Changes a bit of what a transfer landed."""
    program = transfer._program
    if program is None:
        return
    targets = [np.frombuffer(line, dtype=np.uint8) for line in program._lines[0]] + program._blocks[0]
    targets = [target for target in targets if target.size]
    target = targets[salt % len(targets)]
    place = salt // len(targets) % target.size
    target.flat[place] ^= 1 << salt % 8


def _wrap_memory(injector: Injector) -> None:
    stock = memory._available

    def available() -> int:
        fault = injector.at("memory.available")
        return 0 if fault is not None and fault.kind == FILL else stock()

    memory._available = available
