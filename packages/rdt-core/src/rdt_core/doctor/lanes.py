"""How UCX moves the bytes of a NIXL read, from the tables that it logs when it chooses a protocol.

A table names the operation ("remote memory read by ucp_get… into host memory from host") and, for each range of sizes,
what is done and over which transport and device. Reading "software emulation" there is what tells a slow link from a busy
machine. Pure; where a log has no such table nothing is said.
"""

from __future__ import annotations

import re

#: set before a process makes its agent: UCX then logs its choices into a file
LOG_VARIABLES = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "warn"}
EMULATED = "software emulation"

_RULE = re.compile(r"\+-[-+]*-\+\s*$")
_ROW = re.compile(r"\|(.*)\|\s*$")


def lanes(log: str) -> list[str]:
    """Returns the lane of large reads from another process, in the order in which UCX chose them.

    Args:
        log: what UCX wrote.

    Returns:
        "zero-copy cma/memory", "software emulation tcp/lo", and so on: what is done and the transports of it.
    """
    found = []
    for title, rows in _tables(log):
        read = any("remote memory read" in line for line in title)
        if read and rows and not any(" self cfg#" in line for line in title):
            cells = [cell.strip() for cell in rows[-1].split("|")]  # the last row is that of the largest sizes
            found.append(" ".join(cells[-2:]))
    return found


def _tables(log: str) -> list[tuple[list[str], list[str]]]:
    """Titles and rows of each table: three parts between rules, the second of them the header."""
    tables: list[tuple[list[str], list[str]]] = []
    parts: list[list[str]] = []
    for line in log.splitlines():
        if _RULE.search(line):
            if len(parts) == 3:  # the rule that closes a table
                tables.append((parts[0], parts[2]))
                parts = []
            else:
                parts.append([])
        elif parts and (match := _ROW.search(line)):
            parts[-1].append(match[1])
    return tables
