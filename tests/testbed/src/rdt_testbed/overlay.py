"""Packages beside an environment, for a test that needs an extra which all other tests are better off without.

`overlay` installs what an extra asks for and this environment lacks, each without its own requirements, until nothing is
missing; nothing of the environment itself changes. Put the folder on a program's PYTHONPATH. Needs a package index.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def overlay(requirement: str, folder: Path, *, timeout_s: float = 300.0) -> Path:
    """Installs what is missing for a requirement like "ray[default]" into a folder.

    Args:
        requirement: a package that is installed, with extras.
        folder: is made if it is not there.
        timeout_s: for each call of uv.

    Raises:
        subprocess.CalledProcessError: a package cannot be installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while names := sorted(set(_missing(Requirement(requirement), folder, set()))):
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(folder),
            *names,
        ]
        subprocess.run(command, check=True, timeout=timeout_s)
    return folder


def _missing(wanted: Requirement, folder: Path, seen: set[str]) -> Iterator[str]:
    key = f"{canonicalize_name(wanted.name)}[{','.join(sorted(wanted.extras))}]"
    if key in seen:
        return
    seen.add(key)
    found = next(iter(importlib.metadata.distributions(name=wanted.name)), None)
    if found is None:
        found = next(iter(importlib.metadata.distributions(name=wanted.name, path=[str(folder)])), None)
    if found is None:
        yield str(Requirement(f"{wanted.name}{wanted.specifier}"))
        return
    for text in found.requires or ():
        inner = Requirement(text)
        extras = wanted.extras or {""}
        if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
            yield from _missing(inner, folder, seen)
