"""The stock SchedulerActor of SGLang's Ray mode, with methods that receive weights beside its event loop.

The event loop holds the actor's default thread for life, so these methods run in a concurrency group of their own, with one
thread. Stock actors load no plugins; this one does, before its scheduler is made. Everything else is the stock actor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from sglang.srt.ray import scheduler_actor as stock

from .plugin import install_scheduler_hooks
from .protocol import WEIGHTS_GROUP
from .weights import SchedulerWeights, weights_of

_Stock: Any = stock.SchedulerActor.__ray_metadata__.modified_class.__ray_actor_class__


class WeightsSchedulerActor(_Stock):
    """One scheduler that can receive weights. Arguments as those of SGLang's own `SchedulerActor`.

    Every method below acts for this rank alone and raises for itself; see `SchedulerWeights` for what each does and raises.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import sglang.srt.managers.scheduler  # noqa: F401  (plugins see by it that this is a scheduler's process)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        install_scheduler_hooks()
        super().__init__(*args, **kwargs)

    def run_event_loop(self) -> None:
        """Runs SGLang's own event loop; blocks until shutdown."""
        if self.scheduler.device == "cpu":
            # stock sets a CUDA device first, whatever the scheduler runs on
            self.scheduler.run_event_loop()
        else:
            super().run_event_loop()

    @ray.method(concurrency_group=WEIGHTS_GROUP)
    def prepare_weights(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """See `SchedulerWeights.prepare`."""
        return self._weights().prepare(info)

    @ray.method(concurrency_group=WEIGHTS_GROUP)
    def begin_weights(self, version: int, timeout_s: float) -> None:
        """See `SchedulerWeights.begin`."""
        self._weights().begin(version, timeout_s)

    @ray.method(concurrency_group=WEIGHTS_GROUP)
    def pull_weights(self, version: int, timeout_s: float) -> dict[str, Any]:
        """See `SchedulerWeights.pull`."""
        return self._weights().pull(version, timeout_s)

    @ray.method(concurrency_group=WEIGHTS_GROUP)
    def finish_weights(self, version: int, timeout_s: float) -> None:
        """See `SchedulerWeights.finish`."""
        self._weights().finish(version, timeout_s)

    @ray.method(concurrency_group=WEIGHTS_GROUP)
    def abort_weights(self, version: int, reason: str) -> None:
        """See `SchedulerWeights.abort`."""
        self._weights().abort(version, reason)

    @ray.method(concurrency_group=WEIGHTS_GROUP)
    def weights_status(self) -> dict[str, Any]:
        """See `SchedulerWeights.status`."""
        return self._weights().status()

    @ray.method(concurrency_group=WEIGHTS_GROUP)
    def release_weights(self) -> None:
        """See `SchedulerWeights.close`."""
        self._weights().close()

    def _weights(self) -> SchedulerWeights:
        return weights_of(self.scheduler)


SchedulerActor = ray.remote(concurrency_groups={WEIGHTS_GROUP: 1}, enable_tensor_transport=True)(WeightsSchedulerActor)
