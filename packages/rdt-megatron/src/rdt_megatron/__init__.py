"""Megatron-Core side of rdt: the room in which `MegatronSource` will live.

It will declare a Megatron model's own shards (tensor, pipeline and expert parallel) under their checkpoint names, as
views of the parameters and without any gather. This version does not have it: importing the package works and needs no
Megatron, asking for the name raises an error that says what to use today and what the source will need.
"""

from importlib import metadata
from typing import NoReturn

from rdt_core.errors import VersionError

__all__ = ["MegatronSource"]

_FRAMEWORK = "megatron-core"
_SUPPORTED = ">=0.16,<0.20"


def __getattr__(name: str) -> NoReturn:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = f"{_FRAMEWORK} {metadata.version(_FRAMEWORK)}"
    except metadata.PackageNotFoundError:
        found = f"no {_FRAMEWORK}"
    raise VersionError(
        f"{__name__}.{name} is not in this version yet. Today a trainer can sync from plain, FSDP1 and FSDP2 modules "
        f"with rdt_core.ModuleSource. {name} will need {_FRAMEWORK}{_SUPPORTED} (found: {found}): "
        "pip install 'rdt-megatron[megatron]'"
    )
