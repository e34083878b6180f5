"""What the test bed gives an example's trainers through `--setup`: stock megatron-core on a CPU."""

from __future__ import annotations

import contextlib

#: what is entered here lasts as long as the process
_KEPT = contextlib.ExitStack()


def megatron_on_cpu() -> None:
    from rdt_testbed.megatron.shim import cpu_megatron

    _KEPT.enter_context(cpu_megatron())
