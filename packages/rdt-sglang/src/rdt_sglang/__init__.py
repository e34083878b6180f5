"""SGLang side of rdt: the room in which the plugin, the scheduler's `pull_weights` and the clients will live.

A stock SGLang whose schedulers are Ray actors will pull its weights the way vLLM's workers do. This version does not
have it: importing the package works and needs no SGLang, asking for a name raises an error that says what to use today
and what the engine side will need.
"""

from importlib import metadata
from typing import NoReturn

from rdt_core.errors import VersionError

__all__ = ["SglangHttpEngine", "SglangRayEngine"]

_FRAMEWORK = "sglang"
_SUPPORTED = ">=0.5.23"


def __getattr__(name: str) -> NoReturn:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = f"{_FRAMEWORK} {metadata.version(_FRAMEWORK)}"
    except metadata.PackageNotFoundError:
        found = f"no {_FRAMEWORK}"
    raise VersionError(
        f"{__name__}.{name} is not in this version yet. Today rdt serves through vLLM (rdt-vllm). {name} will need "
        f"{_FRAMEWORK}{_SUPPORTED} started with --use-ray (found: {found}): pip install 'rdt-sglang[sglang]'"
    )
