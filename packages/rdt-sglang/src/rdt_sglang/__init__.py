"""The SGLang side of rdt: what a stock SGLang's schedulers need to pull their weights, and the clients that drive it.

With this package installed, stock SGLang finds its plugin by its entry point, in Ray mode (`--use-ray`) and with plain
scheduler processes. Importing this package is cheap and needs no SGLang: a trainer imports the clients only. What runs
inside an engine is imported late and refuses any SGLang that was not tested, naming the command that mends it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rdt_core.distributions import check_release

if TYPE_CHECKING:
    from .clients import SglangHttpEngine, SglangRayEngine
    from .landing import SglangLanding
    from .plugin import register
    from .server import SGLangServer, launch
    from .versions import MissingSglangError, check_sglang

__all__ = [
    "MissingSglangError",
    "SGLangServer",
    "SglangHttpEngine",
    "SglangLanding",
    "SglangRayEngine",
    "check_sglang",
    "launch",
    "register",
]

check_release("rdt-sglang")

_HOMES = {
    "MissingSglangError": "versions",
    "SGLangServer": "server",
    "SglangHttpEngine": "clients",
    "SglangLanding": "landing",
    "SglangRayEngine": "clients",
    "check_sglang": "versions",
    "launch": "server",
    "register": "plugin",
}
#: modules that cannot be imported without SGLang itself
_NEED_SGLANG = frozenset({"landing"})


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home in _NEED_SGLANG:
        from .versions import check_sglang

        check_sglang()
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
