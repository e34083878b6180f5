"""What a soak can be told, and the checks that come before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from ..bench.options import KINDS
from ..demo.options import OptionError
from ..publisher import MODES

#: syncs below which the second half says nothing
LEAST_SYNCS = 10


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """One soak.

    Attributes:
        syncs: how many.
        rejoin_every: after so many syncs all source ranks leave and join again, and the replica is attached again; 0: never.
        reattach_every: after so many syncs the replica is detached, its workers leave, and it is attached again; 0: never.
        kinds: link kinds allowed, in order of preference; "auto" stands for all.
        mode: publish mode.
        ranks: source ranks.
        workers: engine ranks.
        timeout_s: deadline of every wait.
        leak: for tests: what a worker leaks in each sync, empty for nothing (see `actors.Leak`).
    """

    syncs: int = 300
    rejoin_every: int = 0
    reattach_every: int = 0
    kinds: tuple[str, ...] = ("auto",)
    mode: str = "auto"
    ranks: int = 2
    workers: int = 1
    timeout_s: float = 60.0
    leak: str = ""

    def check(self) -> SoakOptions:
        """Returns the options, "auto" kinds spelled out.

        Raises:
            OptionError: something that cannot work.
        """
        if self.syncs < LEAST_SYNCS:
            raise OptionError(
                f"--syncs {self.syncs} is too little; the second half of {LEAST_SYNCS} is the least to judge by"
            )
        for option, value, least in (
            ("--rejoin-every", self.rejoin_every, 0),
            ("--reattach-every", self.reattach_every, 0),
            ("--ranks", self.ranks, 1),
            ("--workers", self.workers, 1),
        ):
            if value < least:
                raise OptionError(f"{option} {value} is too little; expected at least {least}")
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown or not self.kinds:
            raise OptionError(f"--kinds: unknown {', '.join(unknown) or 'empty list'}; known: {', '.join(KINDS)}")
        if self.mode not in MODES:
            raise OptionError(f"--mode {self.mode!r} is unknown; known: {', '.join(MODES)}")
        return self

    @property
    def links(self) -> tuple[str, ...]:
        """Kinds as `WeightSync.join` takes them."""
        return KINDS[:-1] if "auto" in self.kinds else self.kinds
