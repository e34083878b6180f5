"""Which SGLang this package works with: one check, one error.

It is for every module here that reaches into SGLang's schedulers, so that a missing or other release says what was
found, what is needed and the command that mends it. It refuses guesses: the hooks and the landing rely on internals of
the releases that are listed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rdt_core.errors import VersionError

#: releases that the tests of this package ran against; a post-release counts as its release
SUPPORTED: tuple[str, ...] = ("0.5.23",)
#: the same as a requirement, as the extra `sglang` of this package declares it
REQUIREMENT = SpecifierSet(">=0.5.23,<0.5.24")
COMMAND = f"pip install 'sglang{REQUIREMENT}'"


class MissingSglangError(VersionError, ImportError):
    """SGLang is not installed (or a release that was not tested); also an ImportError, so that `try: import` works."""


def find_sglang() -> str | None:
    """Returns the version of the installed SGLang without importing it, or None."""
    if importlib.util.find_spec("sglang") is None:
        return None
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check_sglang(found: str | None = None) -> str:
    """Returns SGLang's version if it is one that works.

    Args:
        found: the version to judge; default: the installed one.

    Raises:
        MissingSglangError: none is installed, or a release that is not in `SUPPORTED`; a build without a release number
            (`0.0.0.dev0`) is refused as well: what it holds cannot be told.
    """
    found = found or find_sglang()
    needed = f"needed: SGLang {' or '.join(SUPPORTED)}. {COMMAND}"
    if found is None:
        raise MissingSglangError(f"SGLang is not installed in this environment; {needed}")
    try:
        release = Version(Version(found).base_version)
    except InvalidVersion:
        release = None
    if release is None or release not in {Version(one) for one in SUPPORTED}:
        raise MissingSglangError(f"found SGLang {found}; {needed}")
    return found
