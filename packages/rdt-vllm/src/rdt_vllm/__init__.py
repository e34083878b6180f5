"""The vLLM side of rdt: weight transfer backend `rdt` for stock vLLM, and the clients that drive it.

`vllm serve MODEL --weight-transfer-config '{"backend": "rdt"}'` finds the backend by its entry point. Importing this
package is cheap and needs no vLLM: a trainer imports the clients only. What runs inside an engine is imported late and
refuses any vLLM that was not tested, naming the command that mends it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rdt_core.distributions import check_release

if TYPE_CHECKING:
    from .clients import VllmHttpEngine, VllmRayEngine
    from .engine import RdtInitInfo, RdtUpdateInfo, RdtWeightTransferEngine
    from .interplay import vllm_source
    from .landing import VllmLanding
    from .plugin import register
    from .server import Generation, VllmServer, launch
    from .versions import MissingVllmError, check_vllm

__all__ = [
    "Generation",
    "MissingVllmError",
    "RdtInitInfo",
    "RdtUpdateInfo",
    "RdtWeightTransferEngine",
    "VllmHttpEngine",
    "VllmLanding",
    "VllmRayEngine",
    "VllmServer",
    "check_vllm",
    "launch",
    "register",
    "vllm_source",
]

check_release("rdt-vllm")

_HOMES = {
    "Generation": "server",
    "MissingVllmError": "versions",
    "RdtInitInfo": "engine",
    "RdtUpdateInfo": "engine",
    "RdtWeightTransferEngine": "engine",
    "VllmHttpEngine": "clients",
    "VllmLanding": "landing",
    "VllmRayEngine": "clients",
    "VllmServer": "server",
    "check_vllm": "versions",
    "launch": "server",
    "register": "plugin",
    "vllm_source": "interplay",
}
#: modules that cannot be imported without vLLM itself
_NEED_VLLM = frozenset({"engine", "landing"})


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home in _NEED_VLLM:
        from .versions import check_vllm

        check_vllm()
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
