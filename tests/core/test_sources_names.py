"""Name rules: parts tile their parameter, wrong rules are refused, unknown fused experts too."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.errors import SourceError
from rdt_core.sources.names import (
    FusedExperts,
    Part,
    Renamed,
    known_model_types,
    parts_of,
    renamer,
    rules_for,
    strip_wrappers,
)

pytestmark = pytest.mark.unit


@given(
    experts=st.integers(0, 5), projections=st.integers(1, 3), rows=st.integers(0, 4), columns=st.integers(1, 4),
    axis=st.sampled_from([1, 2]), transposed=st.booleans(),
)  # fmt: skip
def test_parts_of_fused_experts_tile_the_parameter(
    experts: int, projections: int, rows: int, columns: int, axis: int, transposed: bool
) -> None:
    shape = (experts, rows * projections, columns) if axis == 1 else (experts, columns, rows * projections)
    names = tuple(rf"\1.{{expert}}.{letter}" for letter in "abc"[:projections])
    rule = FusedExperts(r"(.*)\.fused", names, axis=axis, transposed=transposed)
    parts = parts_of("x.experts.fused", shape, [rule], None)
    values = torch.arange(torch.Size(shape).numel()).view(shape)
    count = torch.zeros(shape, dtype=torch.int)
    assert [part.name for part in parts] == [
        f"x.experts.{expert}.{letter}" for expert in range(experts) for letter in "abc"[:projections]
    ]
    for index, part in enumerate(parts):
        box = tuple(slice(first, first + size) for first, size in zip(part.offset, part.shape, strict=True))
        count[box] += 1
        expert, projection = divmod(index, projections)
        expected = values[expert].chunk(projections, axis - 1)[projection] if rows else values[expert]
        if transposed:
            expected = expected.t()
        assert part.full_shape == tuple(expected.shape)
        assert torch.equal(values[box].permute(0, *part.axes)[0], expected)
    assert bool((count == 1).all())


def test_projections_must_divide_the_axis() -> None:
    rule = FusedExperts(r".*", ("a", "b"))
    with pytest.raises(SourceError, match=r"'x' of shape \(2, 5, 3\) cannot hold 2 projections"):
        rule.parts("x", (2, 5, 3))
    with pytest.raises(SourceError, match="cannot hold"):
        rule.parts("x", (4,))


def test_renamed_matches_the_whole_name() -> None:
    rule = Renamed(r"(.*)\.router\.weight", r"\1.gate.weight")
    assert rule.parts("a.router.weight.x", (2,)) is None
    assert [part.name for part in parts_of("a.router.weight", (2, 3), [rule], None)] == ["a.gate.weight"]
    (part,) = parts_of("w", (2, 3, 4), [Renamed("w", axes=(2, 0, 1))], None)
    assert part.full_shape == (4, 2, 3)
    with pytest.raises(SourceError, match="permutes axes"):
        parts_of("w", (2, 3), [Renamed("w", axes=(1, 1))], None)


@dataclass
class Fixed:
    """A rule that answers what it is told to."""

    answer: tuple[Part, ...]

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((), "declares 0 elements of 8"),
        ((Part("a", (0, 0), (1, 4), (0, 1)),), "declares 4 elements of 8"),
        ((Part("a", (1, 0), (2, 4), (0, 1)),), "outside 'x'"),
        ((Part("a", (0, -1), (2, 4), (0, 1)),), "outside 'x'"),
        ((Part("a", (0, 0), (2, 4), (1,)),), "the axes"),
        ((Part("a", (0, 0), (2, 4), (0, 0)),), "the axes"),
    ],
)
def test_rules_that_do_not_tile_are_refused(answer: tuple[Part, ...], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        parts_of("x", (2, 4), [Fixed(answer)], None)


def test_rules_whose_parts_overlap_are_refused() -> None:
    twice = Part("a", (0, 0), (1, 4), (0, 1)), Part("b", (0, 0), (1, 4), (0, 1))
    with pytest.raises(SourceError, match="'a' and 'b' of 'x' overlap"):
        parts_of("x", (2, 4), [Fixed(twice)], None)


def test_only_fused_experts_need_a_rule() -> None:
    assert parts_of("conv.weight", (2, 3, 4), (), None)[0].name == "conv.weight"
    assert parts_of("mlp.experts.0.up_proj.weight", (3, 4), (), None)[0].full_shape == (3, 4)
    with pytest.raises(SourceError, match=r"model type 'other' \(known: .*qwen3_moe"):
        parts_of("mlp.experts.up_proj", (2, 3, 4), (), "other")


def test_rules_by_model_type() -> None:
    assert {"qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe"} <= set(known_model_types())
    assert rules_for("llama") == rules_for(None) == ()
    names = [
        part.name
        for name, shape in (("l.mlp.experts.gate_up_proj", (1, 4, 3)), ("l.mlp.experts.down_proj", (1, 3, 2)))
        for part in parts_of(name, shape, rules_for("mixtral"), "mixtral")
    ]
    assert names == [f"l.block_sparse_moe.experts.0.w{index}.weight" for index in (1, 3, 2)]


def test_prefixes() -> None:
    rename = renamer({"a.": "", "a.b.": "c.", "d": None})
    assert [rename(name) for name in ("a.x", "a.b.x", "d.x", "x")] == ["x", "c.x", None, "x"]
    assert renamer(None)("x") == "x"
    assert strip_wrappers("_orig_mod.a._fsdp_wrapped_module.b._checkpoint_wrapped_module.w") == "a.b.w"
