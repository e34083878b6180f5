"""Gather groups from tensor names: the tensors of one decoder layer belong together.

The layer index is the outermost component of a name that is a number, whatever stands before it, so any
architecture's prefix works (`model.layers.3.…`, `transformer.h.3.…`, `visual.blocks.3.…`). Nothing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence


def layer_of(name: str) -> tuple[str, int] | None:
    """The stack that a tensor belongs to and its layer index there: ("model.layers", 3), or None without an index."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        # isdecimal alone would let in digits of other scripts
        if (
            part.isascii() and part.isdecimal() and len(part) < 10
        ):  # a longer number is no index, and int() may refuse it
            return ".".join(parts[:position]), int(part)
    return None


def groups(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Sorts tensor names into groups.

    Args:
        names: of checkpoint tensors, each once, in the order of the model.

    Returns:
        The names without a layer index that come before the first one with an index; then one group for each layer,
        stack after stack in the order of their first appearance, with ascending index; then all other names without
        an index. Groups are never empty, each name is in one of them, and keeps its order there.
    """
    first: list[str] = []
    last: list[str] = []
    stacks: dict[str, dict[int, list[str]]] = {}
    for name in names:
        layer = layer_of(name)
        if layer is not None:
            stacks.setdefault(layer[0], {}).setdefault(layer[1], []).append(name)
        elif stacks:
            last.append(name)
        else:
            first.append(name)
    layers = [stack[index] for stack in stacks.values() for index in sorted(stack)]
    return tuple(tuple(group) for group in (first, *layers, last) if group)
