"""Names in UCX_TLS: how a value is read, which names UCX has, and which of them bring a transport along.

UCX only warns of a name that it does not know, in a log that nobody reads, and goes on with what is left. The list is of
transports and groups in UCX 1.20 to 1.23 (`UCT_TL_DEFINE` in src/uct, `ucp_tl_aliases` in src/ucp/core/ucp_context.c);
a later release may have more, which its own library tells (`Facts.ucx_knows`). Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

TLS = "UCX_TLS"
PLUGIN_DIR = "NIXL_PLUGIN_DIR"

_GROUPS = (
    "all", "mm", "sm", "shm", "ib", "ud_v", "ud_x", "ud", "rc_v", "rc_x", "rc", "dc", "dc_x", "ugni", "cuda", "rocm", "ze",
    "gaudi", "gga",
)  # fmt: skip
_TRANSPORTS = (
    "cma", "cuda_copy", "cuda_ipc", "dc_mlx5", "gaudi_gdr", "gdr_copy", "gga_mlx5", "knem", "posix", "rc_gda", "rc_mlx5",
    "rc_verbs", "rocm_copy", "rocm_gdr", "rocm_ipc", "self", "srd", "sysv", "tcp", "ud_mlx5", "ud_verbs", "ugni_rdma",
    "ugni_smsg", "ugni_udt", "xpmem", "ze_copy", "ze_gdr", "ze_ipc",
)  # fmt: skip
_KNOWN = (*_GROUPS, *_TRANSPORTS)
#: names that bring a transport along: UCX's own groups of them
_BRINGS = {
    "cma": ("all", "sm", "shm", "cma"),
    "cuda_ipc": ("all", "cuda", "cuda_ipc"),
    "cuda_copy": ("all", "cuda", "cuda_copy"),
    "rc": ("all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x", "srd"),
}  # fmt: skip


def listed(value: str) -> list[str]:
    """The parts of a list as UCX's variables hold it."""
    return [part.strip() for part in value.split(",") if part.strip()]


def transports(value: str) -> list[str]:
    """The names of transports and groups in a value of UCX_TLS.

    Args:
        value: a list; "^" before it leaves out what it names, "\\\\" before a name says that it is no group, ":aux" behind
            one that it is for start-up only.
    """
    return [name.removeprefix("\\").partition(":")[0] for name in listed(value.removeprefix("^"))]


def unknown(value: str, known_too: Collection[str] = ()) -> dict[str, str]:
    """The names in a value of UCX_TLS that UCX does not have, each with the known one that is most like it, or "".

    Args:
        value: see `transports`.
        known_too: what the library at hand has besides.
    """
    found = {}
    for name in transports(value):
        if name not in _KNOWN and name not in known_too:
            found[name] = next(iter(difflib.get_close_matches(name, _KNOWN, 1)), "")
    return found


def excludes(value: str, transport: str) -> bool:
    """Whether a value of UCX_TLS leaves out a transport.

    Args:
        value: see `transports`.
        transport: "cma", "cuda_ipc", "cuda_copy" or "rc" (any RDMA).
    """
    names = set(transports(value))
    if not value.startswith("^"):
        return not names & set(_BRINGS[transport])
    if transport == "rc":
        return "ib" in names
    return bool(names & set(_BRINGS[transport]))
