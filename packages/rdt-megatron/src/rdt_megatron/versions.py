"""Which Megatron-Core this package works with: one check, one error.

The rules rest on how Megatron names its parameters and cuts them over ranks, which was read and run in the releases
below. A missing or other release is refused with what was found, what is needed and the command that mends it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rdt_core.errors import VersionError

#: as the extra `megatron` of this package declares it
REQUIREMENT = SpecifierSet(">=0.16,<0.20")
COMMAND = f"pip install 'megatron-core{REQUIREMENT}'"


class MissingMegatronError(VersionError, ImportError):
    """Megatron-Core is not installed, or a release that was not tested; also an ImportError, for `try: import`."""


def find_megatron() -> str | None:
    """Returns the version of Megatron-Core without importing it, or None where there is none.

    A source tree on the path (Megatron-LM) has no metadata: then what it says itself counts, once it is imported.
    """
    loaded = sys.modules.get("megatron.core")
    if loaded is not None and getattr(loaded, "__version__", None):
        return str(loaded.__version__)
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_megatron(found: str | None = None) -> str:
    """Returns Megatron-Core's version if it is one that works.

    Args:
        found: the version to judge; default: the one of this process.

    Raises:
        MissingMegatronError: none is installed, or a release outside `REQUIREMENT`. Release candidates and development
            builds count as the release that they lead to.
    """
    found = found or find_megatron()
    needed = f"needed: megatron-core {REQUIREMENT}. {COMMAND}"
    if found is None:
        raise MissingMegatronError(f"Megatron-Core is not installed in this environment; {needed}")
    try:
        works = Version(Version(found).base_version) in REQUIREMENT
    except InvalidVersion:
        works = False
    if not works:
        raise MissingMegatronError(f"found megatron-core {found}; {needed}")
    return found
