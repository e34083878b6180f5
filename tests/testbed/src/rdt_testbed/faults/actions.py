"""What a group does in a trial, and how its owner brings it back afterwards: what a trainer and an operator do in earnest."""

from __future__ import annotations

from typing import Any

from .checks import Broken
from .world import World

#: deadlines one after the other, at most, until every source rank has its outcome: begin (and once more after replicas
#: planned again), what was sent ahead taken back, pause, begin, pull, finish, the failure told, abort, commit and what
#: follows; joins, connects and pauses before
STEPS = {
    "publish": 7,
    "refused": 7,
    "move": 9,
    "restart": 10,
    "attach": 10,
    "catch_up": 11,
    "takeover": 12,
    "usurp": 12,
    "coordinator": 10,
}


def act(world: World, action: str, committed: int | None, limit_s: float) -> list[Any]:
    """Does what a trial's group does.

    Args:
        world: that it happens in.
        action: of `STEPS`.
        committed: the group's version.
        limit_s: seconds for every step.

    Returns:
        For each source rank whether it answered, and the outcome of its sync. Where a step before the sync failed on rank 0,
        the sync is not begun.
    """
    last = list(world.replicas)[-1]
    if action == "move":
        world.answers([world.ask(name, "move") for name in world.sources], limit_s)
    elif action in ("restart", "attach", "catch_up"):
        steps = [("detach", last)] if action == "attach" else []
        for worker in world.replicas[last]:
            world.fork(worker)
            world.rearm(worker)
        steps += [("forget", last), ("attach" if action == "attach" else "reconnect", last)]
        for method, *args in steps:
            ((ok, value),) = world.answers([world.ask("source0", method, *args)], limit_s)
            if not ok or failed(value):
                return [(ok, value), *((False, None) for _ in world.sources[1:])]
        if action == "catch_up" and committed is not None:
            world.answers([world.ask(name, "fill", committed) for name in world.sources], limit_s)
            return world.answers([world.ask(name, "catch_up") for name in world.sources], limit_s)
    elif action in ("takeover", "usurp"):
        name = world.sources[-1]
        if action == "usurp":
            world.keep(name)  # the old process lives, and does not know
        world.fork(name)
        world.rearm(name)
        world.ask(name, "start", world.version, {"takeover": True})
        if name == "source0":
            for replica in world.replicas:
                world.ask(name, "attach", replica)
        if action == "usurp":
            return _both(world, limit_s)
    elif action == "coordinator":
        world.kill_coordinator()
    elif action == "refused":
        return world.answers([world.ask(name, "publish", 0) for name in world.sources], limit_s)
    return world.publish(limit_s)


def _both(world: World, limit_s: float) -> list[Any]:
    """A process whose rank was taken over publishes as well. Returns the outcomes of the others."""
    old = world.zombies[-1]
    if not all(ok for ok, _ in world.answers([world.ask(name, "attached") for name in world.sources], limit_s)):
        return world.publish(limit_s)  # the new one did not join
    late = world.ask_child(old, "publish", world.version + 1)
    ((ok, value),) = world.answers([late], limit_s)
    # only the coordinator knows that the place was taken: where it died, whoever comes first is the rank
    struck = value is None and (old.is_stopped or not old.is_alive)  # the fault was its own
    if not world.lost and not struck and (not ok or value["error"] != "TakenOverError"):
        raise Broken(f"a source rank whose place was taken was not refused: {value}")
    return world.publish(limit_s)


def heal(world: World) -> list[str]:
    """Brings back what died and publishes; every replica takes part again. Returns what went wrong, which is nothing."""
    world.calm()
    world.answers([], 0)  # notices what died
    attached: list[str] = []
    dead = []
    for name in world.sources:
        # one whose join failed is started again as well
        ((ok, value),) = world.answers([world.ask(name, "attached")], world.calm_s)
        if not ok:
            dead.append(name)
        elif name == "source0":
            attached = value
    workers = [name for name in world.workers if not world.is_alive(name)]
    for name in (*workers, *dead):
        world.fork(name)
    status = world.status()
    joined = status is not None and not status.missing
    asked = [world.ask(name, "start", world.version, {"takeover": True}) for name in dead]
    hurt = {name.rpartition("/")[0] for name in world.workers if name in world.forked}
    asked += [world.ask("source0", "forget", replica) for replica in hurt if "source0" not in dead]
    missing = [replica for replica in world.replicas if replica not in attached]
    if not joined and "source0" not in dead and missing:
        # the coordinator died, and nobody knows yet: the next sync builds the group again, with the replicas it has
        world.version += 1
        asked += [world.ask(name, "publish", world.version) for name in world.sources]
    if joined:
        asked += [world.ask("source0", "reconnect", replica) for replica in hurt if replica in attached]
    asked += [world.ask("source0", "attach", replica) for replica in missing]
    found = [*world.publish(), *world.answers(asked, world.calm_s)]
    return [f"{ok} {value}" for ok, value in found if not ok or failed(value) or _left_out(value)]


def failed(value: Any) -> bool:
    """Whether an answer says that what was asked for failed."""
    return isinstance(value, dict) and bool(value.get("error"))


def _left_out(value: Any) -> bool:
    return isinstance(value, dict) and "report" in value and bool(getattr(value["report"], "failed", None))
