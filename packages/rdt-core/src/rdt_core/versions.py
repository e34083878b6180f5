"""What must be installed for a sync to work, checked once at join on both sides.

Floors for Ray, NIXL and torch, combinations known to be broken, one version for all rdt packages, and the wire format
that the peer speaks. Every refusal is one `VersionError` that lists everything wrong at once: found, needed, and the
command that mends it. Versions are compared as versions ("2.6" is older than "2.56"), a pre-release as its release.
"""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .distributions import SIBLINGS, VENDORED, installed, rdt_version
from .errors import VersionError
from .wire import DTYPE_BYTES, WIRE_MAJOR, WIRE_MINOR, TensorMeta, VersionMeta

#: what works, by distribution. Ray got targets for one-sided pulls in 2.56; NIXL is tested within 1.x.
SUPPORTED: dict[str, SpecifierSet] = {
    "ray": SpecifierSet(">=2.56"),
    "nixl": SpecifierSet(">=1.0,<2"),
    "torch": SpecifierSet(">=2.7"),
}

#: the wheels that hold NIXL's libraries; the distribution `nixl` holds the module of that name and picks one of them
NIXL_BACKENDS = ("nixl-cu12", "nixl-cu13")


@dataclass(frozen=True, slots=True)
class KnownBad:
    """A combination of installed distributions that is known not to work.

    Attributes:
        versions: the combination: specifier by distribution; None means that it is not installed.
        reason: what goes wrong with it.
        mend: the command that gets out of it.
    """

    versions: Mapping[str, str | None]
    reason: str
    mend: str


KNOWN_BAD: tuple[KnownBad, ...] = tuple(
    KnownBad(
        {"nixl": None, backend: ">=0"},
        f"{backend} alone has no module `nixl`, which is the name that Ray imports",
        "pip install 'nixl>=1.0,<2'",
    )
    for backend in NIXL_BACKENDS
)


class Problem(str):
    """One thing that is wrong with an installation, as the text that errors carry.

    Attributes:
        found: what is there.
        needed: what should be.
        mend: the command that gets there.
    """

    found: str
    needed: str
    mend: str

    def __new__(cls, found: str, needed: str, mend: str) -> Problem:
        """Makes the text."""
        made = super().__new__(cls, f"found: {found}; needed: {needed}; to mend: {mend}")
        made.found, made.needed, made.mend = found, needed, mend
        return made


def current() -> VersionMeta:
    """Returns what this process runs, without judging it. Imports nothing."""
    return VersionMeta(
        rdt=rdt_version(),
        wire_major=WIRE_MAJOR,
        wire_minor=WIRE_MINOR,
        ray=installed("ray"),
        nixl=installed("nixl"),
        torch=installed("torch"),
        python=platform.python_version(),
    )


def check_local(need_nixl: bool) -> VersionMeta:
    """Checks this process's installation and returns what it runs.

    Args:
        need_nixl: whether a link kind is wanted that moves bytes by NIXL. If so it is imported, the way Ray does.

    Raises:
        VersionError: names each thing found, what is needed, and the command that mends it.
    """
    # adapters that are installed beside a vendored copy belong to another rdt
    names = (*SUPPORTED, *NIXL_BACKENDS, *(() if VENDORED else SIBLINGS))
    wrong = problems({name: installed(name) for name in names}, need_nixl, rdt_version())
    if need_nixl and not wrong:
        try:
            importlib.import_module("nixl._api")
        except (ImportError, OSError) as error:
            found = f"nixl {installed('nixl')} is installed but `import nixl._api` fails: {error}"
            wrong = [
                _problem(found, "a NIXL that loads on this machine", "pip install --force-reinstall 'nixl>=1.0,<2'")
            ]
    _raise(wrong, "this process cannot take part in a sync")
    return current()


def problems(found: Mapping[str, str], need_nixl: bool, rdt: str) -> list[Problem]:
    """Lists what is wrong with a set of installed distributions.

    Args:
        found: version by distribution; "" or absent where it is not installed.
        need_nixl: whether NIXL must be there. It must be in range wherever it is there.
        rdt: the version of rdt-core.
    """
    wrong = []
    broken = [bad for bad in KNOWN_BAD if need_nixl and _matches(found, bad.versions)]
    wrong += [
        _problem(_found(found, bad.versions), f"something else, because {bad.reason}", bad.mend) for bad in broken
    ]
    for name, supported in SUPPORTED.items():
        version = found.get(name, "")
        if not version:
            if name != "nixl" or (need_nixl and not broken):
                wrong.append(_problem(f"{name} is not installed", f"{name}{supported}", _install(name)))
        elif not _within(version, supported):
            wrong.append(_problem(f"{name} {version}", f"{name}{supported}", _install(name)))
    for name in NIXL_BACKENDS:
        version = found.get(name, "")
        if version and found.get("nixl") and not _equal(version, found["nixl"]):
            wrong.append(
                _problem(
                    f"nixl {found['nixl']} beside {name} {version}",
                    "one version of both",
                    f"pip install 'nixl=={found['nixl']}' '{name}=={found['nixl']}'",
                )
            )
    for name in SIBLINGS:
        version = found.get(name, "")
        if version and version != rdt:
            wrong.append(
                _problem(
                    f"{name} {version} beside rdt-core {rdt}",
                    "one version of all rdt packages",
                    f"pip install 'rdt-core=={rdt}' '{name}=={rdt}'",
                )
            )
    return wrong


def check_peer(mine: VersionMeta, theirs: VersionMeta, who: str) -> None:
    """Checks what another member declares against what this one runs.

    Args:
        mine: of this process.
        theirs: as received.
        who: names the peer in the error, e.g. `source rank 3`.

    Raises:
        VersionError: another wire major, or a Ray, NIXL or torch of theirs that is out of range.
    """
    wrong = []
    if theirs.wire_major != mine.wire_major:
        wrong.append(
            _problem(
                f"{who} speaks wire format {theirs.wire_major}.{theirs.wire_minor} (rdt {theirs.rdt})",
                f"wire format {mine.wire_major}.x as this side (rdt {mine.rdt})",
                f"there: pip install 'rdt-core=={mine.rdt}'",
            )
        )
    for name, version in (("ray", theirs.ray), ("nixl", theirs.nixl), ("torch", theirs.torch)):
        # a member without NIXL can still read and serve by link kinds that do without
        if (version or name != "nixl") and not _within(version, SUPPORTED[name]):
            found = f"{who} runs {name} {version or '(none)'}"
            wrong.append(_problem(found, f"{name}{SUPPORTED[name]}", f"there: {_install(name)}"))
    _raise(wrong, f"{who} and this process cannot take part in one sync")


def check_dtypes(tensors: Iterable[TensorMeta], who: str) -> None:
    """Checks that this process's torch has every dtype that a member publishes.

    Raises:
        VersionError: names the first tensor of each dtype that is missing.
    """
    import torch

    missing: dict[str, str] = {}
    for tensor in tensors:
        known = tensor.dtype in DTYPE_BYTES and isinstance(getattr(torch, tensor.dtype, None), torch.dtype)
        if not known:
            missing.setdefault(tensor.dtype, tensor.name)
    wrong = [
        _problem(
            f"{who} publishes {name!r} as {dtype}, which torch {torch.__version__} or this rdt does not have",
            f"one of {', '.join(sorted(DTYPE_BYTES))}",
            "pip install --upgrade torch, or publish with another wire dtype",
        )
        for dtype, name in missing.items()
    ]
    _raise(wrong, f"tensors of {who} cannot be received")


def newest(found: Iterable[str]) -> str:
    """Returns the newest of some versions; what is no version counts as the oldest."""
    return max(found, key=lambda one: (_parse(one) or Version("0"), one))


def _problem(found: str, needed: str, mend: str) -> Problem:
    return Problem(found, needed, mend)


def _raise(wrong: Sequence[str], what: str) -> None:
    if wrong:
        raise VersionError(f"{what}:\n" + "\n".join(f"- {line}" for line in wrong))


def _install(name: str) -> str:
    return f"pip install '{name}{SUPPORTED[name]}'"


def _parse(version: str) -> Version | None:
    """A version without pre-release, development and local parts, or None where it is not a version."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return None


def _within(version: str, supported: SpecifierSet) -> bool:
    parsed = _parse(version)
    return parsed is not None and supported.contains(parsed)


def _equal(one: str, other: str) -> bool:
    a, b = _parse(one), _parse(other)
    return a is not None and a == b


def _matches(found: Mapping[str, str], combination: Mapping[str, str | None]) -> bool:
    return all(
        not found.get(name) if wanted is None else bool(found.get(name)) and _within(found[name], SpecifierSet(wanted))
        for name, wanted in combination.items()
    )


def _found(found: Mapping[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {found[name]}" if found.get(name) else f"no {name}" for name in names)
