"""Groups of tensor names, over the prefixes of real architectures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.layout import groups, layer_of
from rdt_testbed.chains import cases

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.12.self_attn.q_proj.weight", ("model.layers", 12)),
        ("model.layers.3.mlp.experts.127.up_proj.weight", ("model.layers", 3)),
        ("transformer.h.0.attn.c_attn.weight", ("transformer.h", 0)),
        ("model.visual.blocks.7.attn.qkv.weight", ("model.visual.blocks", 7)),
        ("encoder.layers.2.blocks.5.w", ("encoder.layers", 2)),
        ("0.weight", ("", 0)),
        ("model.embed_tokens.weight", None),
        ("conv1.weight", None),
        ("model.layers.\u0663.w", None),
    ],
)
def test_layer_is_the_outermost_number(name: str, layer: tuple[str, int] | None) -> None:
    assert layer_of(name) == layer


def test_groups_of_a_decoder() -> None:
    names = [
        "embed.weight",
        "layers.0.a",
        "layers.10.a",
        "layers.2.a",
        "layers.0.experts.9.b",
        "norm.weight",
        "lm_head.weight",
    ]
    assert groups(names) == (
        ("embed.weight",),
        ("layers.0.a", "layers.0.experts.9.b"),
        ("layers.2.a",),
        ("layers.10.a",),
        ("norm.weight", "lm_head.weight"),
    )


def test_stacks_stay_apart_in_order_of_appearance() -> None:
    names = [
        "visual.patch.weight",
        "visual.blocks.1.w",
        "visual.blocks.0.w",
        "visual.merger.w",
        "embed.w",
        "model.layers.0.w",
        "norm.w",
    ]
    assert groups(names) == (
        ("visual.patch.weight",),
        ("visual.blocks.0.w",),
        ("visual.blocks.1.w",),
        ("model.layers.0.w",),
        ("visual.merger.w", "embed.w", "norm.w"),
    )


def test_without_layers_there_is_one_group() -> None:
    assert groups(["a", "b"]) == (("a", "b"),)
    assert groups([]) == ()


@cases(300)
@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "0", "1", "20"]), min_size=1, max_size=4).map(".".join),
        unique=True,
        max_size=12,
    )
)
def test_each_name_is_in_one_group_and_keeps_its_order(names: list[str]) -> None:
    found = groups(names)
    assert sorted(name for group in found for name in group) == sorted(names)
    for group in found:
        assert group
        assert list(group) == [name for name in names if name in group]
        assert len({layer_of(name) for name in group}) == 1
