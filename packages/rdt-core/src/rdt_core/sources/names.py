"""Checkpoint names of a module's parameters: rules that map one parameter to one or more checkpoint tensors.

A rule maps boxes of a parameter to whole checkpoint tensors; it never touches data, so that a sharded parameter can be
declared under other names without a copy. Built-in rules cover the fused experts of the model types listed in
`rules_for`. A fused expert tensor that no rule knows is refused: its layout is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import SourceError

#: Prefixes that wrappers put into the names of a module's parameters and that no checkpoint has.
WRAPPER_PREFIXES = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")

Rename = Callable[[str], str | None] | Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a parameter that is one whole checkpoint tensor.

    Attributes:
        name: the checkpoint tensor.
        offset: of the box, in elements of the parameter.
        shape: of the box.
        axes: the box's axis behind each axis of the checkpoint tensor; axes left out have size 1 in the box.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the checkpoint tensor."""
        return tuple(self.shape[axis] for axis in self.axes)


class NameRule(Protocol):
    """Maps a parameter to checkpoint tensors."""

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[Part] | None:
        """Returns what the parameter `name` of full shape `shape` holds, or None where the rule does not apply.

        The parts must tile the parameter: no element in two parts, none in no part.
        """
        ...


def whole(name: str, shape: tuple[int, ...]) -> Part:
    """Returns the part that declares all of a parameter under `name`."""
    return Part(name=name, offset=(0,) * len(shape), shape=shape, axes=tuple(range(len(shape))))


@dataclass(frozen=True, slots=True)
class Renamed:
    """Declares a parameter whole, under another name or in another axis order.

    Args:
        pattern: regular expression that must match the whole name.
        name: the checkpoint name, a replacement template of `re` (`\\1` is the first group).
        axes: the parameter's axis behind each axis of the checkpoint tensor; default: as they are.
    """

    pattern: str
    name: str = r"\g<0>"
    axes: tuple[int, ...] | None = None

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[Part] | None:
        """See `NameRule.parts`. Raises SourceError if `axes` is no permutation of the parameter's axes."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        part = whole(match.expand(self.name), shape)
        if self.axes is None:
            return (part,)
        if sorted(self.axes) != list(range(len(shape))):
            raise SourceError(
                f"the rule for {self.pattern!r} permutes axes {self.axes}, but {name!r} has shape {shape}"
            )
        return (Part(name=part.name, offset=part.offset, shape=shape, axes=self.axes),)


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Declares a parameter that stacks experts along axis 0 under one name for each expert and projection.

    Args:
        pattern: regular expression that must match the whole name.
        names: checkpoint names of the projections that lie one after the other along `axis`, each a replacement
            template of `re` in which `{expert}` stands for the expert's index.
        axis: the parameter's axis along which the projections were concatenated, with equal sizes.
        transposed: whether the checkpoint stores each expert's matrix transposed.
    """

    pattern: str
    names: tuple[str, ...]
    axis: int = 1
    transposed: bool = False

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[Part] | None:
        """See `NameRule.parts`. Raises SourceError if the shape cannot hold the projections."""
        match = re.fullmatch(self.pattern, name)
        if match is None:
            return None
        if not 0 < self.axis < len(shape) or shape[self.axis] % len(self.names):
            raise SourceError(
                f"{name!r} of shape {shape} cannot hold {len(self.names)} projections of each expert along axis "
                f"{self.axis}, as the rule for {self.pattern!r} says; pass a rule that fits in `rules`"
            )
        size = shape[self.axis] // len(self.names)
        box = (1, *(size if axis == self.axis else extent for axis, extent in enumerate(shape) if axis))
        axes = tuple(range(1, len(shape)))
        templates = [match.expand(template) for template in self.names]
        return tuple(
            Part(
                name=template.replace("{expert}", str(expert)),
                offset=tuple(expert if axis == 0 else index * size * (axis == self.axis) for axis in range(len(shape))),
                shape=box,
                axes=axes[::-1] if self.transposed else axes,
            )
            for expert in range(shape[0])
            for index, template in enumerate(templates)
        )


_GATE_UP_DOWN: tuple[NameRule, ...] = (
    FusedExperts(
        pattern=r"(.*\.mlp\.experts)\.gate_up_proj",
        names=(r"\1.{expert}.gate_proj.weight", r"\1.{expert}.up_proj.weight"),
    ),
    FusedExperts(pattern=r"(.*\.mlp\.experts)\.down_proj", names=(r"\1.{expert}.down_proj.weight",)),
)

_W1_W2_W3: tuple[NameRule, ...] = (
    FusedExperts(
        pattern=r"(.*)\.mlp\.experts\.gate_up_proj",
        names=(r"\1.block_sparse_moe.experts.{expert}.w1.weight", r"\1.block_sparse_moe.experts.{expert}.w3.weight"),
    ),
    FusedExperts(pattern=r"(.*)\.mlp\.experts\.down_proj", names=(r"\1.block_sparse_moe.experts.{expert}.w2.weight",)),
    # "router" where the model type calls the gate so
    Renamed(pattern=r"(.*)\.mlp\.(?:gate|router)\.weight", name=r"\1.block_sparse_moe.gate.weight"),
    Renamed(pattern=r"(.*)\.mlp\.e_score_correction_bias", name=r"\1.block_sparse_moe.e_score_correction_bias"),
)

# Types whose checkpoints hold `mlp.experts.0.gate_proj.weight` and so on.
_GATE_UP_DOWN_TYPES = (
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash", "mellum", "olmoe", "qwen2_moe",
    "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip

#: Rules by the `model_type` of a transformers configuration (transformers 5 fuses experts, their checkpoints do not).
_BY_MODEL_TYPE: dict[str, tuple[NameRule, ...]] = {
    **dict.fromkeys(_GATE_UP_DOWN_TYPES, _GATE_UP_DOWN),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral", "phimoe"), _W1_W2_W3),
    "ernie4_5_moe": (
        *_GATE_UP_DOWN,
        Renamed(pattern=r"(.*\.mlp)\.gate\.(moe_statics\.e_score_correction_bias)", name=r"\1.\2"),
    ),
    "exaone_moe": (*_GATE_UP_DOWN, Renamed(pattern=r"(.*\.mlp)\.gate\.(e_score_correction_bias)", name=r"\1.\2")),
    "gpt_oss": (Renamed(pattern=r".*\.mlp\.experts\.(?:gate_up|down)_proj(?:_bias)?"),),
}


def known_model_types() -> tuple[str, ...]:
    """Returns the model types for which there are built-in rules."""
    return tuple(sorted(_BY_MODEL_TYPE))


def rules_for(model_type: str | None) -> tuple[NameRule, ...]:
    """Returns the built-in rules for a transformers `model_type`; none for types without fused experts."""
    return _BY_MODEL_TYPE.get(model_type or "", ())


def strip_wrappers(name: str) -> str:
    """Returns a parameter's name without what FSDP, `torch.compile` and activation checkpointing put into it."""
    for prefix in WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def renamer(rename: Rename | None) -> Callable[[str], str | None]:
    """Returns `rename` as a function from a parameter's name to its name in the checkpoint, or None to leave it out.

    A mapping is by prefix: the longest one that the name starts with is replaced; None leaves these names out.
    """
    if rename is None:
        return lambda name: name
    if not isinstance(rename, Mapping):
        return rename
    prefixes = sorted(rename.items(), key=lambda item: -len(item[0]))

    def by_prefix(name: str) -> str | None:
        for prefix, replacement in prefixes:
            if name.startswith(prefix):
                return None if replacement is None else replacement + name[len(prefix) :]
        return name

    return by_prefix


def parts_of(name: str, shape: tuple[int, ...], rules: Sequence[NameRule], model_type: str | None) -> Sequence[Part]:
    """Returns the checkpoint tensors that a parameter holds: those of the first rule that applies, else itself.

    Raises:
        SourceError: a fused expert tensor (three axes or more) for which there is no rule, or a rule whose parts
            do not fit the parameter.
    """
    for rule in rules:
        parts = rule.parts(name, shape)
        if parts is not None:
            _check_tiling(name, shape, parts)
            return parts
    if len(shape) >= 3 and "experts" in name.split("."):
        raise SourceError(
            f"{name!r} of shape {shape} holds several experts in one tensor, and there is no rule for its layout in "
            f"checkpoints of model type {model_type!r} (known: {', '.join(known_model_types())}); pass `rules=` with a "
            f"FusedExperts rule for it, or Renamed({re.escape(name)!r}) if the checkpoint holds it as it is"
        )
    return (whole(name, shape),)


def _check_tiling(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    volume = 0
    for part in parts:
        size = 1
        for offset, extent, full in zip(part.offset, part.shape, shape, strict=True):
            if offset < 0 or extent < 0 or offset + extent > full:
                raise SourceError(
                    f"a rule puts {part.name!r} at {part.offset}+{part.shape}, outside {name!r} of shape {shape}"
                )
            size *= extent
        volume += size
        dropped = set(range(len(shape))) - set(part.axes)
        if len(set(part.axes)) != len(part.axes) or any(part.shape[axis] != 1 for axis in dropped):
            raise SourceError(f"a rule gives {part.name!r} the axes {part.axes} of a box {part.shape} of {name!r}")
    total = 1
    for extent in shape:
        total *= extent
    if volume != total:
        raise SourceError(f"the rule for {name!r} of shape {shape} declares {volume} elements of {total}")
    open_parts: list[Part] = []
    for part in sorted((part for part in parts if 0 not in part.shape), key=lambda part: part.offset[:1]):
        # Sorted along axis 0, so that only the parts that still run where this one starts can overlap it.
        open_parts = [other for other in open_parts if not shape or other.offset[0] + other.shape[0] > part.offset[0]]
        for other in open_parts:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(part.offset, part.shape, other.offset, other.shape, strict=True)
            ):
                raise SourceError(f"a rule makes {other.name!r} and {part.name!r} of {name!r} overlap")
        open_parts.append(part)
