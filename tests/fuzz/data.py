"""Bytes as a stream of decisions: what a fuzzer mutates becomes numbers, choices and messages with hostile values.

The same bytes always give the same decisions; past their end everything is 0. Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

#: where arithmetic breaks: ends of the integer types that travel or that numpy and torch count in
EDGES = (
    -1, -(1 << 31), -(1 << 63), (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 53, (1 << 60) - 1, 1 << 60, 1 << 61,
    1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 10**9,
)  # fmt: skip


class Data:
    """Decisions out of bytes.

    Args:
        data: read from its start, a byte or two for each decision.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Bytes that no decision has used yet."""
        return max(len(self._data) - self._at, 0)

    def take(self, count: int) -> bytes:
        """The next bytes, zeros past the end."""
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken.ljust(count, b"\0")

    def below(self, end: int) -> int:
        """A number from 0 up to `end`, which is left out and at most 65536."""
        size = 1 if end <= 256 else 2
        return int.from_bytes(self.take(size), "little") % end

    def chance(self, of: int = 2) -> bool:
        """True once in so many times (never at the end of the bytes, unless `of` is 1)."""
        return self.below(of) == of - 1

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self.below(len(choices))]

    def number(self) -> int:
        """An integer: mostly small, often at an edge, sometimes any of 64 bits."""
        kind = self.below(8)
        if kind < 5:
            return self.below(16)
        return self.pick(EDGES) if kind < 7 else int.from_bytes(self.take(8), "little", signed=True)

    def shape(self, axes: int = 4, size: int = 6) -> tuple[int, ...]:
        """A small shape."""
        return tuple(self.below(size + 1) for _ in range(self.below(axes + 1)))


def mutate(data: Data, value: Any) -> Any:
    """A message out of dicts, lists and numbers with one value changed, wherever the data says.

    Args:
        data: decides.
        value: as of `msgspec.to_builtins`; not changed itself.
    """
    if isinstance(value, dict) and value:
        key = data.pick(sorted(value))
        if data.below(16) == 15:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: mutate(data, value[key])}
    if isinstance(value, list) and value and data.below(8) < 7:
        at = data.below(len(value))
        return [*value[:at], mutate(data, value[at]), *value[at + 1 :]]
    if isinstance(value, list):
        return [*value, *value[-1:], *(data.number() for _ in range(data.below(3)))] if data.below(8) < 7 else [[]]
    if isinstance(value, bytes):
        size = 8 * data.below(len(value) // 8 + 2)
        return value[:size] + data.number().to_bytes(16, "little", signed=True)[:8] + value[size + 8 :]
    if isinstance(value, str):
        return data.pick(["", "bfloat16", "float32", "no.such", "a/b", "\0", value + "x", "layers." + "9" * 5000])
    return data.number() if data.below(8) < 7 else data.pick([None, "x", 0.5, [], {}])
