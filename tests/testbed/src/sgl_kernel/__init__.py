"""Stands for SGLang's kernels on a CPU without AMX: every name imports, and raises when it is called.

SGLang imports these names when its modules load and, without AMX, runs torch's own operations instead. A test fixture:
never part of a wheel of rdt. It registers no operator, so `torch.ops.sgl_kernel` stays empty, as SGLang expects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0+testbed"


def _missing(name: str) -> Callable[..., NoReturn]:
    def call(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but this is the testbed's stand-in without kernels")

    call.__name__ = call.__qualname__ = name
    return call


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _missing(name)
