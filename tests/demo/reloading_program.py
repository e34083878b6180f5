"""A run in which the engine goes back to its checkpoint behind the trainer's back, after version 1 was stamped.

Arguments: checkpoint, directory for the report. Ends with the run's error on standard error, or with status 0.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray

from rdt_core.demo import DemoOptions, loop
from rdt_core.demo.engines import Completion, load_engine
from rdt_core.errors import RdtError


class Forgetful:
    """The engine that was asked for, which loads its checkpoint again before it samples with version 1."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.name = inner.name
        self.client = inner.client

    def generate(self, prompts: Any, **arguments: Any) -> list[list[Completion]]:
        if self._inner.version(timeout_s=60) == 1:
            ray.get(self._inner._handle.collective_rpc.remote("reload_weights"), timeout=60)
        return self._inner.generate(prompts, **arguments)

    def version(self, *, timeout_s: float) -> int | None:
        return self._inner.version(timeout_s=timeout_s)

    def shutdown(self) -> None:
        self._inner.shutdown()


def main() -> None:
    inner = load_engine("vllm")
    loop.load_engine = lambda name: lambda *args, **arguments: Forgetful(inner(*args, **arguments))
    # a step that a random model's log-probabilities show
    options = DemoOptions(steps=2, model=Path(sys.argv[1]), out=Path(sys.argv[2]), learning_rate=1e-2, max_tokens=8)
    try:
        loop.run(options)
    except RdtError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
