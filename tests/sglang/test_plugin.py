"""What the plugin hooks in which process of SGLang. Each case is a process of its own: hooks are for life.

Where what is imported first is the question, that process starts anew; the others are forks of one that has imported SGLang.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from rdt_testbed.programs import SGLANG_ENVIRONMENT
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.engine

PRELUDE = """
import os, sys, logging
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
os.environ.update({environment!r})
def loaded(name):
    return name in sys.modules
"""


def process(code: str, *, fork: Warm | None = None) -> tuple[str, str]:
    done = subprocess.run(
        [fork.python if fork else sys.executable, "-c", PRELUDE.format(environment=SGLANG_ENVIRONMENT) + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout, done.stderr


def test_ray_mode_gets_our_actor_and_the_routes_whatever_was_imported_first(warm_sglang: Warm | None):
    process(
        """
import sglang.srt.ray.engine as engine
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from rdt_sglang import actor
assert engine.SchedulerActor is actor.SchedulerActor
options = actor.SchedulerActor._default_options
assert options["enable_tensor_transport"] and options["concurrency_groups"]["weights"] == 1, options
from rdt_sglang.plugin import register
register(); register()
HookRegistry.apply_hooks()
for target, hooks in HookRegistry._hooks.items():
    ours = [hook for kind, hook, source in hooks]
    assert len(ours) == len(set(map(id, ours))), target
""",
        fork=warm_sglang,
    )


def test_a_launcher_that_loads_plugins_first_gets_our_actor_when_it_launches():
    process(
        """
from sglang.srt.plugins import load_plugins
load_plugins()
assert not loaded("sglang.srt.ray.engine"), "Ray mode was not asked for"
assert not loaded("sglang.srt.entrypoints.http_server")
from sglang.srt.ray.engine import RayEngine
import sglang.srt.ray.engine as engine
stock = engine.SchedulerActor
try:
    RayEngine._launch_subprocesses(None)
except Exception as error:
    print("as expected:", type(error).__name__)
from rdt_sglang import actor
assert engine.SchedulerActor is actor.SchedulerActor and stock is not actor.SchedulerActor
"""
    )


def test_a_plain_scheduler_gets_its_hooks_and_no_ray_actor():
    process(
        """
import sglang.srt.managers.scheduler as module
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
launch = loaded("sglang.srt.entrypoints.engine")
before = {name: getattr(module.Scheduler, name) for name in (
    "pause_generation", "continue_generation", "process_input_requests", "handle_rpc_request")}
from sglang.srt.plugins import load_plugins
load_plugins()
for name, old in before.items():
    assert getattr(module.Scheduler, name) is not old, name
assert loaded("sglang.srt.entrypoints.engine") == launch, "the launcher's module is of no use here"
assert not loaded("rdt_sglang.actor") and not loaded("sglang.srt.ray.engine")
from rdt_sglang.guard import FOREIGN
for name in FOREIGN:
    assert hasattr(getattr(Manager, name), "__wrapped__"), name
"""
    )


def test_another_sglang_is_logged_at_once_and_told_to_whoever_connects(warm_sglang: Warm | None):
    _, log = process(
        """
import importlib.metadata
real = importlib.metadata.version
importlib.metadata.version = lambda name: "0.5.99" if name == "sglang" else real(name)
import sglang.srt.managers.scheduler as module
before = module.Scheduler.pause_generation
from sglang.srt.plugins import load_plugins
load_plugins()
assert module.Scheduler.pause_generation is before, "nothing is hooked"
from rdt_core.errors import VersionError
for attempt in (lambda: module.Scheduler.rdt_weights(None, call="status", arguments="{}"),
                lambda: __import__("rdt_sglang.weights").weights.SchedulerWeights(None)):
    try:
        attempt()
    except VersionError as error:
        assert "found SGLang 0.5.99" in str(error)
    else:
        raise AssertionError("no error")
""",
        fork=warm_sglang,
    )
    assert "rdt cannot update the weights of this SGLang: found SGLang 0.5.99; needed: SGLang 0.5.23" in log
