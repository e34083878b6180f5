"""What can go wrong, where and when: one fault and one trial as data, with a line of text for each to replay it by.

A point is a phase of one member (`source0 control.begin`), before or after it, at one of its occurrences. Refuses text that
names no fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: what can happen to a process at any point
PROCESS_KINDS = ("kill", "stop", "delay", "handles")
#: what can happen to a control message or a call of an engine client
MESSAGE_KINDS = ("drop", "duplicate", "lose")
#: what can happen to the bytes of a message that has some
CORRUPT = "corrupt"
#: something that fails: a transfer, a landing, a source
FAIL = "fail"
#: no memory is left for an arena
FILL = "fill"
#: bytes that change between owner and reader
FLIP = "flip"
KINDS = (*PROCESS_KINDS, *MESSAGE_KINDS, CORRUPT, FAIL, FILL, FLIP)

#: `value` of a stop: the process goes on once the others have their outcome, or as a zombie that was replaced meanwhile
LATE, ZOMBIE = 0.0, -1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        member: "coordinator", "source0", "replica0/1", …
        phase: of it, e.g. "control.begin", "landing.open", "transfer.post".
        occurrence: of the phase since the trial began, from 1.
        when: "before" or "after" it.
        kind: of `KINDS`.
        value: seconds of a delay, or until a stopped process goes on (or LATE, ZOMBIE); for "corrupt", which bit.
    """

    member: str
    phase: str
    occurrence: int
    when: str
    kind: str
    value: float = 0.0

    def __str__(self) -> str:
        return f"{self.member} {self.phase} {self.occurrence} {self.when} {self.kind} {self.value:.12g}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads what `str` wrote. Raises ValueError for anything else."""
        parts = text.split()
        if not 5 <= len(parts) <= 6 or not parts[2].isdigit():
            raise ValueError(f"no fault: {text!r}")
        member, phase, occurrence, when, kind, *value = parts
        if when not in ("before", "after") or kind not in KINDS:
            raise ValueError(f"no fault: {text!r}")
        return cls(member, phase, int(occurrence), when, kind, float(value[0]) if value else 0.0)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a world is made of.

    Attributes:
        sources: number of source ranks.
        replicas: engine ranks of each replica.
        mode: of publishing.
        policy: of the group.
        pack: `pack_threshold`, in bytes.
        verify: of the group.
    """

    sources: int = 2
    replicas: tuple[int, ...] = (1, 2)
    mode: str = "live"
    policy: str = "require_all"
    pack: int = 0
    verify: str = "off"

    def __str__(self) -> str:
        replicas = "+".join(map(str, self.replicas))
        return (
            f"sources={self.sources} replicas={replicas} mode={self.mode} policy={self.policy} pack={self.pack} "
            f"verify={self.verify}"
        )

    @classmethod
    def parse(cls, text: str) -> Setup:
        """Reads what `str` wrote; what is not named has its default."""
        pairs: dict[str, Any] = dict(part.split("=") for part in text.split())
        for name in ("sources", "pack"):
            if name in pairs:
                pairs[name] = int(pairs[name])
        if "replicas" in pairs:
            pairs["replicas"] = tuple(map(int, pairs["replicas"].split("+")))
        return cls(**pairs)


@dataclass(frozen=True, slots=True)
class Trial:
    """One step of a campaign.

    Attributes:
        setup: of the world that it runs in.
        action: what the group does meanwhile; see `campaign.ACTIONS`.
        faults: that are injected.
    """

    setup: Setup = field(default_factory=Setup)
    action: str = "publish"
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        return f"{self.setup}; {self.action}; {' & '.join(map(str, self.faults))}"

    @classmethod
    def parse(cls, text: str) -> Trial:
        """Reads what `str` wrote."""
        setup, action, faults = (part.strip() for part in text.split(";"))
        return cls(Setup.parse(setup), action, tuple(Fault.parse(one) for one in faults.split(" & ") if one))
