"""How UCX moves the bytes of a NIXL read, from the tables that it logs when it chooses a protocol.

A table names the operation ("remote memory read by ucp_get… into host memory from host") and, for each range of sizes,
what is done and over which transport and device. Reading "software emulation" there is what tells a slow link from a busy
machine. UCX 1.22 changed the form of these tables; both are read. Pure; where a log has none it is said what it has.
"""

from __future__ import annotations

import re

EMULATED = "software emulation"

_RULE = re.compile(r"\+-[-+]*-\+\s*$")
_ROW = re.compile(r"\|(.*)\|\s*$")
_HEADER = re.compile(r"\s*Range\s*\|")
#: in each title: to whom, as UCX counts its kinds of endpoints
_CONFIG = " cfg#"
_READ = "remote memory read"


def log_variables(path: str) -> dict[str, str]:
    """Variables of a process that make UCX log its choices. They count from the moment at which UCX is loaded.

    Args:
        path: of the log; UCX puts the process's pid for "%p".
    """
    return {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "warn", "UCX_LOG_FILE": path}


def lane_of(log: str | None) -> tuple[str, str]:
    """Returns the lane that UCX chose last, and why it is not known where it is "".

    Args:
        log: what UCX wrote; None where there is no log.
    """
    if log is None:
        return "", "UCX wrote no log"
    found = lanes(log)
    if found:
        return found[-1], ""
    count = len(log.splitlines())
    if _READ in log:
        return "", f"UCX's log of {count} lines tells of reads in a form that is not known here"
    return "", f"UCX's log of {count} lines has no table of reads from another process"


def lanes(log: str) -> list[str]:
    """Returns the lane of large reads from another process, in the order in which UCX chose them.

    Args:
        log: what UCX wrote.

    Returns:
        "zero-copy cma/memory", "software emulation tcp/lo", and so on: what is done and the transports of it.
    """
    found = []
    for title, rows in _tables(log):
        if _READ in title and " self cfg#" not in title and rows:
            cells = [cell.strip() for cell in rows[-1].split("|")]  # the last row is that of the largest sizes
            found.append(" ".join(cells[-2:]))
    return found


def _tables(log: str) -> list[tuple[str, list[str]]]:
    """Title and rows of each table: the first and the last of its parts; new releases have a header in between."""
    tables: list[tuple[str, list[str]]] = []
    for part in _parts(log):
        if any(_CONFIG in line for line in part):
            tables.append(("\n".join(part), []))
        elif part and tables and not tables[-1][1] and not _HEADER.match(part[0]):
            tables[-1][1].extend(part)
    return tables


def _parts(log: str) -> list[list[str]]:
    """The lines between two rules each, without what other threads logged in between."""
    parts: list[list[str]] = [[]]
    for line in log.splitlines():
        if _RULE.search(line):
            parts.append([])
        elif match := _ROW.search(line):
            parts[-1].append(match[1])
    return parts
