"""Each mechanism that keeps a promise, switched off: the trial that holds with it is noticed without it."""

from __future__ import annotations

import re

import pytest

from rdt_testbed.faults.campaign import Broken, Runner, Trial
from rdt_testbed.faults.mutations import MUTATIONS
from rdt_testbed.faults.summary import Heartbeat

pytestmark = pytest.mark.integration

#: a message that comes twice may come in time to do no harm
ATTEMPTS = 8
#: by mechanism: a trial that shows it, and what is said when it is off
TRIALS = {
    "accounts": ("sources=2 replicas=1; publish; replica0/0 control.done 1 before drop", "without an account"),
    "torn": ("sources=2 replicas=1 mode=bucket; publish; replica0/0 transfer.post 5 before fail", "never committed"),
    "stamp": ("sources=2 replicas=1; publish; source0 control.commit 1 before drop", "committed were"),
    "token": ("sources=2 replicas=1; usurp; ", "was not refused"),
    "epoch": ("sources=2 replicas=1 mode=live; move; ", "serves other weights"),
    "rounds": ("sources=1 replicas=1 mode=bucket; publish; replica0/0 transfer.post 3 before delay 0.3", "other weights"),
    "digests": ("sources=2 replicas=1 verify=full; publish; replica0/0 transfer.post 1 before flip 4711", "other weights"),
    "watchdog": ("sources=1 replicas=1; publish; source0 control.commit 1 before stop -1", "still runs"),
    "deadlines": ("sources=1 replicas=1; publish; coordinator coordinator.enter 1 before stop 0", "did not answer"),
    "begin-twice": ("sources=2 replicas=1; publish; source0 control.begin 1 before duplicate", "could not be healed"),
    "late-connect": ("sources=1 replicas=1; attach; replica0/0 landing.trace 1 before stop -1", "did harm"),
    "early": ("sources=2 replicas=1 mode=snapshot; publish; source0 publisher.write 1 before delay 0.1", "other weights"),
    "take-back": ("sources=1 replicas=1; refused; ", "stand still"),
    "broken-links": (
        "sources=2 replicas=1 mode=bucket; publish; replica0/0 transfer.wait 2 before fail", "could not be healed"
    ),
}  # fmt: skip


def test_every_mutation_has_its_trial():
    assert TRIALS.keys() == MUTATIONS.keys()


@pytest.mark.parametrize("name", TRIALS)
@pytest.mark.parametrize(
    "mutation", [pytest.param(False, id="holds", marks=pytest.mark.thorough), pytest.param(True, id="is_noticed")]
)
def test_a_mechanism_that_is_switched_off_is_noticed(name, mutation, nursery):
    spec, said = TRIALS[name]
    trial = Trial.parse(spec)
    with Heartbeat() as heartbeat:
        limits = {"timeout_s": 0.25, "calm_s": 1.5, "mutation": name} if mutation else {"timeout_s": 0.4}
        noticed = []
        for _ in range(ATTEMPTS if mutation else 1):
            runner = Runner(nursery, heartbeat, **limits)
            try:
                runner.run(trial)
            except Broken as broken:
                noticed.append(str(broken))
            runner.close()
            if noticed:
                break
    if mutation:
        assert re.search(said, "".join(noticed)), noticed
    else:
        assert not noticed
        assert runner.summary.faults == len(trial.faults)
