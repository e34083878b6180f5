"""What a campaign did, counted, and how late its own threads woke up: what a loaded machine adds to every deadline."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field


class Heartbeat:
    """How late a thread of this process wakes up. A context manager."""

    _EVERY_S = 0.01

    def __init__(self) -> None:
        self._worst = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def start(self) -> None:
        """Measures from now on."""
        self._worst = 0.0

    @property
    def slack_s(self) -> float:
        """Seconds that a wait may take beyond its deadline: a sync has some twenty messages, each of which may be late."""
        return 0.3 + 20 * self._worst

    def _beat(self) -> None:
        while not self._end.is_set():
            began = time.monotonic()
            time.sleep(self._EVERY_S)
            self._worst = max(self._worst, time.monotonic() - began - self._EVERY_S)


@dataclass
class Summary:
    """What a campaign did.

    Attributes:
        trials: that were run.
        struck: faults that happened, by kind and phase.
        missed: faults whose point was not passed.
        actions: trials by what the group did.
        outcomes: of syncs under faults, by error class; "" is a success.
        checked: digests of engine ranks that said they serve a version.
        ahead: engine ranks that were found paused ahead of a sync that did not begin.
        longest_s: of a sync under faults, in seconds.
        latest: the greatest part of its deadlines that a source rank's call took.
        zombies: processes that went on after they had been replaced.
        worlds: that were made.
        seconds: that it took.
        failures: each broken promise and the trial's text.
    """

    trials: int = 0
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    ahead: int = 0
    longest_s: float = 0.0
    latest: float = 0.0
    zombies: int = 0
    worlds: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)

    @property
    def faults(self) -> int:
        """Faults that happened."""
        return sum(self.struck.values())

    def __str__(self) -> str:
        kinds: Counter[str] = Counter()
        phases: Counter[str] = Counter()
        for (kind, phase), count in self.struck.items():
            kinds[kind] += count
            phases[phase] += count

        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{name or 'success'} {count}" for name, count in counts.most_common())

        return (
            f"{self.faults} faults in {self.trials} trials and {self.worlds} worlds, {self.seconds:.0f} s "
            f"({self.missed} more did not come to pass)\n  actions: {listed(self.actions)}\n  kinds: {listed(kinds)}\n"
            f"  phases: {listed(phases)}\n  outcomes: {listed(self.outcomes)}\n  {self.checked} digests checked, "
            f"{self.ahead} left paused ahead, {self.zombies} zombies woken, longest sync {self.longest_s:.2f} s, "
            f"at most {self.latest:.0%} of the deadlines used, {len(self.failures)} promises broken"
        )
