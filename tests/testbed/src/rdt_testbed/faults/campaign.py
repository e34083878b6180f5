"""A campaign: trial after trial in worlds that are used again, each checked by `checks` and then healed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from rdt_core.errors import RdtError

from . import plan
from .actions import STEPS, act, heal
from .checks import Broken, Checks
from .faults import Setup, Trial
from .nursery import Nursery
from .summary import Heartbeat, Summary
from .world import CALM_S, Unanswered, World

#: trials in one world, at most, before it is made anew
_TRIALS = 25


class Runner:
    """Runs trials.

    Args:
        nursery: where members are forked.
        heartbeat: measures the machine.
        timeout_s: deadline of every wait under faults.
        calm_s: deadline while the group is healed.
        mutation: a mechanism that is switched off; see `mutations`.

    Attributes:
        summary: of everything that it ran.
        pids: of every process that its worlds had.
    """

    def __init__(
        self,
        nursery: Nursery,
        heartbeat: Heartbeat,
        *,
        timeout_s: float = 0.8,
        calm_s: float = CALM_S,
        mutation: str = "",
    ) -> None:
        self.summary = Summary()
        self.timeout_s = timeout_s
        self.calm_s = calm_s
        self._nursery = nursery
        self.heartbeat = heartbeat
        self._mutation = mutation
        self.pids: set[int] = set()
        self._world: World | None = None
        self._checks: Checks | None = None
        self._passed: dict[tuple[Setup, str], plan.Passed] = {}

    def campaign(
        self,
        faults: int,
        seed: int,
        *,
        kinds: Sequence[str] = (),
        stop_at: int = 1,
        say: Callable[[str], None] = print,
        advance: Callable[[int], object] = lambda done: None,
    ) -> Summary:
        """Draws trials until so many faults have happened.

        Args:
            faults: that shall happen.
            seed: draws the trials.
            kinds: of faults; none: all.
            stop_at: broken promises after which it ends early.
            say: told about each broken promise.
            advance: told after each trial how many faults have happened.
        """
        rng = random.Random(seed)
        began = time.monotonic()
        wanted = self.summary.faults + faults
        drawn = 0
        trials = min(_TRIALS, max(2, faults // 4))  # a small campaign sees several worlds as well
        setup = plan.draw_setup(rng, kinds)
        while self.summary.faults < wanted and len(self.summary.failures) < stop_at:
            if drawn and drawn % trials == 0:
                setup = plan.draw_setup(rng, kinds)
            drawn += 1
            action = plan.draw_action(rng)
            trial = Trial(setup, action)
            try:
                if (setup, action) not in self._passed:
                    self._passed[setup, action] = self.clean(setup, action)
                trial = plan.draw(rng, setup, action, self._passed[setup, action], self.timeout_s, kinds)
                self.run(trial)
            except Broken as broken:
                self.summary.failures.append((str(broken), str(trial)))
                say(f"seed {seed}, trial {drawn}: {broken}\n  --fault '{trial}'")
            advance(self.summary.faults - wanted + faults)
        self.close()
        self.summary.seconds += time.monotonic() - began
        return self.summary

    def clean(self, setup: Setup, action: str) -> plan.Passed:
        """Runs an action without faults; returns the phases that were passed."""
        world, checks = self._world_of(setup)
        try:
            world.arm([], is_calm=True)
            found = act(world, action, checks.version, world.calm_s)
            if action == "refused":
                _refused(found)
            else:
                world.expect(found)
            passed = world.passed()
            world.calm()
            serving = world.serving(world.calm_s)
            checks.paused(serving)
            checks.everybody(serving)
        except (AssertionError, RdtError) as error:
            self._throw_away()
            raise Broken(f"without a fault, {action}: {error}") from error
        return passed

    def run(self, trial: Trial) -> None:
        """Runs one trial.

        Raises:
            Broken: a promise was broken. The world is thrown away then.
        """
        self.summary.trials += 1
        self.summary.actions[trial.action] += 1
        world, checks = self._world_of(trial.setup)
        try:
            self._run(world, checks, trial)
        except (Unanswered, Broken) as broken:
            self._throw_away()
            raise Broken(str(broken)[:1500]) from broken
        except BaseException:
            self._throw_away()
            raise

    def close(self) -> None:
        """Ends the present world. Raises Broken if a process of it stays."""
        if self._world is not None:
            world, self._world = self._world, None
            pids = world.pids
            self.pids |= set(world.ever)
            world.close()
            left = [pid for pid in pids if _runs(pid)]
            if left:
                raise Broken(f"processes {left} are left")

    def _run(self, world: World, checks: Checks, trial: Trial) -> None:
        step_s = world.timeout_s + world.grace_s
        held_s = sum(max(fault.value, 0) for fault in trial.faults if fault.kind in ("delay", "stop"))
        limit_s = STEPS[trial.action] * step_s + 2 * held_s
        self.heartbeat.start()
        world.arm(trial.faults)
        try:
            found = act(world, trial.action, checks.version, limit_s + 2.0)
        finally:
            self._count(world, trial)
        hit = {trial.faults[number].member for number in world.struck}
        checks.outcomes(trial, found, hit, limit_s, self.heartbeat.slack_s)
        # before limits are lifted: what everybody says right after the failure is what users see
        world.release()
        serving = world.serving(4 * step_s + held_s + self.heartbeat.slack_s)
        checks.serving(serving)
        checks.paused(serving)
        checks.success(trial, found, hit, serving)
        checks.idle(trial, self.heartbeat.slack_s)
        wrong = heal(world)
        if wrong:
            raise Broken(f"the group could not be healed: {wrong}")
        checks.everybody(world.serving(world.calm_s))
        if world.zombies:
            self._wake(world, checks)

    def _wake(self, world: World, checks: Checks) -> None:
        """Zombies go on: others took their places, and they must not do harm."""
        self.summary.zombies += len(world.zombies)
        for child in world.zombies:
            child.signal(signal.SIGCONT)
        end = time.monotonic() + 1.5 * (world.timeout_s + world.grace_s)
        while time.monotonic() < end:
            checks.everybody(world.serving(world.calm_s), may_pause=True)
            world.answers([], 0)
            time.sleep(0.05)
        try:
            world.expect(world.publish())
        except AssertionError as error:
            raise Broken(f"a zombie did harm: {error}") from error
        checks.everybody(world.serving(world.calm_s))
        for child in world.zombies:
            child.end()
        world.zombies.clear()

    def _count(self, world: World, trial: Trial) -> None:
        for number, fault in enumerate(trial.faults):
            if number in world.struck:
                self.summary.struck[fault.kind, fault.phase.partition(":")[0]] += 1
            else:
                self.summary.missed += 1

    def _world_of(self, setup: Setup) -> tuple[World, Checks]:
        if self._world is not None and self._world.setup != setup:
            self.close()
        if self._world is None or self._checks is None:
            self.summary.worlds += 1
            world = World(self._nursery, setup, timeout_s=self.timeout_s, calm_s=self.calm_s, mutation=self._mutation)
            checks = Checks(world, self.summary)
            try:
                world.start()
                checks.everybody(world.serving(world.calm_s))
            except BaseException:
                world.close()
                raise
            self._world, self._checks = world, checks
        return self._world, self._checks

    def _throw_away(self) -> None:
        if self._world is not None:
            world, self._world = self._world, None
            world.close()


def _refused(found: Sequence[Any]) -> None:
    wrong = [value for ok, value in found if not ok or value["error"] != "SyncError"]
    assert not wrong, f"a version that is too low was not refused: {wrong}"


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
