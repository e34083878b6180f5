"""Entry point of group `sglang.srt.plugins`: makes stock SGLang able to receive weights. Nothing else of it changes.

SGLang calls it in its driver, in plain scheduler processes and in their helpers; our actor calls it in Ray mode. It is
idempotent and imports nothing heavy when the module loads. Each process gets what it needs: the driver of a Ray engine our
actor class, a scheduler the hooks of `guard` and `rpc`. Paths come from this package's own name, so that a vendored copy
registers itself. Under an SGLang that was not tested it hooks nothing, logs why, and connecting fails with the same error.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

from rdt_core.errors import VersionError

from .versions import check_sglang

log = logging.getLogger(__name__)

_PACKAGE = __name__.rpartition(".")[0]
_SCHEDULER = "sglang.srt.managers.scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"
_LAUNCH = "sglang.srt.entrypoints.engine"
_RAY_ENGINE = "sglang.srt.ray.engine"
_CHILDREN = (_SCHEDULER, "sglang.srt.managers.detokenizer_manager", "sglang.srt.managers.data_parallel_controller")

#: what marks a class or a module as hooked, so that a second registration does nothing
_MARK = "_rdt_hooked_by"


def register() -> None:
    """Registers this package with the SGLang of this process. SGLang applies the hooks when all plugins are loaded."""
    try:
        check_sglang()
    except VersionError as error:
        # SGLang only logs what a plugin raises; whoever connects this engine later is told by `SchedulerWeights`
        log.error("rdt cannot update the weights of this SGLang: %s", error)
        _offer_error()
        return
    # a launcher loads plugins before anything else; each kind of child process has imported its own module by then
    if _LAUNCH in sys.modules or not any(module in sys.modules for module in _CHILDREN):
        _register_driver_hooks()
    if _SCHEDULER in sys.modules:
        _register_scheduler_hooks()


def install_scheduler_hooks() -> None:
    """Registers and applies the hooks of a scheduler, whoever loaded plugins before. For our actor."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    check_sglang()
    importlib.import_module(_SCHEDULER)
    _register_scheduler_hooks()
    HookRegistry.apply_hooks()


def install_actor() -> None:
    """Puts our actor in the place of SGLang's own, where the launcher of Ray mode looks for it. Idempotent."""
    engine = sys.modules.get(_RAY_ENGINE)
    if engine is None or getattr(engine, _MARK, None) is not None:
        return
    from .actor import SchedulerActor

    vars(engine).update({"SchedulerActor": SchedulerActor, _MARK: _PACKAGE})


def _register_driver_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    launch = importlib.import_module(_LAUNCH)
    if getattr(launch, _MARK, None) is not None:
        return
    setattr(launch, _MARK, _PACKAGE)

    def before_launch(*_args: Any, **_kwargs: Any) -> None:
        install_actor()

    # Ray mode may be imported only after plugins were loaded, but not after it launches
    HookRegistry.register(f"{_LAUNCH}.Engine._launch_subprocesses", before_launch, HookType.BEFORE)
    # and where plugins are loaded by that very launch, the hook above comes too late for it
    install_actor()
    from .routes import register as register_routes

    register_routes()


def _register_scheduler_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from . import guard, rpc

    scheduler = sys.modules[_SCHEDULER]
    if getattr(scheduler, _MARK, None) is not None:
        return
    setattr(scheduler, _MARK, _PACKAGE)
    at = f"{_SCHEDULER}.Scheduler"
    HookRegistry.register(f"{at}.pause_generation", guard.after_pause, HookType.AFTER)
    HookRegistry.register(f"{at}.continue_generation", guard.around_continue, HookType.AROUND)
    HookRegistry.register(f"{at}.process_input_requests", guard.around_requests, HookType.AROUND)
    HookRegistry.register(f"{at}.handle_rpc_request", rpc.around_rpc, HookType.AROUND)
    for name in guard.FOREIGN:
        hook = guard.around_foreign(name)
        HookRegistry.register(f"{_UPDATER}.SchedulerWeightUpdaterManager.{name}", hook, HookType.AROUND)


def _offer_error() -> None:
    """Under an SGLang that was not tested: our calls exist, and say why they cannot work."""
    scheduler = sys.modules.get(_SCHEDULER)
    if scheduler is not None:

        def refuse(_self: Any, **_parameters: Any) -> None:
            check_sglang()

        scheduler.Scheduler.rdt_weights = refuse
