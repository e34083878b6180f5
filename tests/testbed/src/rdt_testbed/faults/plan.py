"""Draws trials from a seed: which world, what the group does, and what goes wrong where.

Points are those that a clean run of the same action in the same world passes, so that most faults strike; points of the
ways of failure (abort, fail, join again) are drawn beside them. The same seed draws the same trials.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from .faults import CORRUPT, FAIL, FILL, FLIP, LATE, ZOMBIE, Fault, Setup, Trial

#: what a group does in a trial, and how often
ACTIONS = {
    "publish": 10, "refused": 2, "move": 3, "restart": 2, "attach": 2, "catch_up": 2, "takeover": 2, "usurp": 1, "coordinator": 2
}  # fmt: skip
#: points that only a group passes in which something failed already
_FAILING = {
    "source": (
        "control.fail",
        "control.join",
        "control.joined",
        "control.status",
        "control.sources",
        "control.replica_ready",
    ),
    "replica": ("landing.abort", "receiver.abort", "worker.abort", "control.fail", "control.sources", "control.knows"),
    "coordinator": ("coordinator.fail", "coordinator.join", "coordinator.joined", "coordinator.tear"),
}
_REQUESTS = ("control.join", "control.connect", "control.done", "control.offer")
_ANSWERS = (
    "control.sources",
    "control.begin",
    "control.offers",
    "control.commit",
    "control.outcome",
    "control.replica_ready",
)
_WEIGHTS = {
    "kill": 4, "stop": 4, "delay": 3, "handles": 2, "drop": 3, "duplicate": 3, "lose": 3, CORRUPT: 3, FAIL: 3, FILL: 3, FLIP: 4
}  # fmt: skip

_SORTS = {"source": 4, "replica": 4, "coordinator": 1}

#: how often each member passes each phase in a clean run
Passed = Mapping[str, Mapping[str, int]]


def draw_setup(rng: random.Random, kinds: Sequence[str] = ()) -> Setup:
    """Draws what a world is made of, for faults of some kinds (none: all)."""
    return Setup(
        sources=rng.choice((1, 1, 2, 2, 3)),
        replicas=rng.choice(((1,), (2,), (1, 1), (1, 2), (1, 2), (2, 1, 1))),
        mode=rng.choice(("live", "snapshot", "bucket")),
        policy=rng.choice(("require_all", "best_effort")),
        pack=rng.choice((0, 0, 1024)),
        verify=rng.choice(("off", "off", "sample", "full")) if tuple(kinds) != (FLIP,) else "full",
    )


def draw_action(rng: random.Random) -> str:
    """Draws what the group does."""
    return rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]


def draw(
    rng: random.Random, setup: Setup, action: str, passed: Passed, timeout_s: float, kinds: Sequence[str] = ()
) -> Trial:
    """Draws the faults of a trial: mostly one, sometimes a second one, often on the way of the first one's failure.

    Args:
        rng: draws.
        setup: of the world.
        action: of the group.
        passed: phases that a clean run of it passes.
        timeout_s: deadline of a wait.
        kinds: of the first fault; none: all.
    """
    faults = [_fault(rng, setup, passed, timeout_s, kinds)]
    if rng.random() < 0.2:
        faults.append(_failing(rng, passed, timeout_s) if rng.random() < 0.5 else _fault(rng, setup, passed, timeout_s))
    return Trial(setup, action, tuple(faults))


def _fault(rng: random.Random, setup: Setup, passed: Passed, timeout_s: float, kinds: Sequence[str] = ()) -> Fault:
    points: dict[str, list[tuple[str, str, str]]] = {}
    for kind in _WEIGHTS:
        if kind != FLIP or setup.verify == "full":
            fitting = [
                (member, phase, when)
                for member in sorted(passed)
                for phase in sorted(passed[member])
                for when in ("before", "after")
                if _fits(kind, phase, when)
            ]
            if fitting:
                points[kind] = fitting
    drawn = [kind for kind in points if not kinds or kind in kinds] or list(points)
    kind = rng.choices(drawn, [_WEIGHTS[one] for one in drawn])[0]
    # members of each sort alike, however many there are, and phases alike, however many kinds fit them
    sorts = [sort for sort in _SORTS if any(member.startswith(sort) for member, _, _ in points[kind])]
    sort = rng.choices(sorts, [_SORTS[one] for one in sorts])[0]
    member = rng.choice(sorted({member for member, _, _ in points[kind] if member.startswith(sort)}))
    phase, when = rng.choice([(phase, when) for one, phase, when in points[kind] if one == member])
    occurrence = rng.randint(1, passed[member][phase]) if rng.random() < 0.5 else 1
    return Fault(member, phase, occurrence, when, kind, _value(rng, kind, member, timeout_s))


def _failing(rng: random.Random, passed: Passed, timeout_s: float) -> Fault:
    while True:
        member = rng.choice(sorted(passed))
        phase = rng.choice(_FAILING[next(sort for sort in _FAILING if member.startswith(sort))])
        when = rng.choice(("before", "after"))
        kind = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        if _fits(kind, phase, when):
            return Fault(member, phase, 1, when, kind, _value(rng, kind, member, timeout_s))


def _value(rng: random.Random, kind: str, member: str, timeout_s: float) -> float:
    if kind == "delay":
        return round(rng.choice((0.1, 0.5, 1.0, 1.6)) * timeout_s * rng.uniform(0.5, 1.0), 3)
    if kind == "stop":
        value = rng.choice((round(0.5 * timeout_s * rng.random() + 0.05, 3), LATE, ZOMBIE))
        return max(value, LATE) if member == "coordinator" else value
    return float(rng.randrange(1 << 20)) if kind in (CORRUPT, FLIP) else 0.0


def _fits(kind: str, phase: str, when: str) -> bool:
    room = phase.partition(".")[0]
    before = when == "before"
    if room == "memory":
        return kind == FILL and before
    if kind in ("drop", "duplicate"):
        return room in ("control", "client") and before
    if kind == "lose":
        return room in ("control", "client") and not before
    if kind == CORRUPT:
        return phase in (_REQUESTS if before else _ANSWERS)
    if kind == FAIL:
        if phase == "publisher.readable" or phase.endswith("abort"):
            return False
        return room in ("transfer", "landing", "publisher", "worker") and before
    if kind == FLIP:
        return phase == "transfer.post" and before
    return kind != FILL
