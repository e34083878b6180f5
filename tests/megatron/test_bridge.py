"""The families' tables against megatron-bridge's own, name by name, where that is installed.

The bridge gathers, so that it is no source; but it names every parameter of every kind of module, TransformerEngine's too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rdt_megatron.families import family_of
from rdt_megatron.rules import match
from rdt_testbed.programs import run

pytestmark = pytest.mark.integration

if importlib.util.find_spec("megatron.bridge") is None:
    pytest.skip("megatron-bridge is not installed", allow_module_level=True)

#: a layer and an expert, in the places of a name's stars
NUMBERS = ("3", "5")

#: in the bridge's tables, and in no checkpoint of the family
NOWHERE = {("deepseek_v2", "mlp.router.expert_bias"), ("glm4_moe", "mlp.shared_experts.router.weight")}


@pytest.fixture(scope="module")
def bridge() -> dict[str, list]:
    return run(Path(__file__).with_name("bridge_program.py"), timeout_s=200)


def filled(name: str) -> str:
    for number in NUMBERS:
        name = name.replace("*", number, 1)
    return name


@pytest.mark.parametrize(
    "name",
    [
        "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe",
    ],
)  # fmt: skip
def test_every_parameter_has_the_bridges_names(bridge: dict[str, list], name: str) -> None:
    compared = 0
    for parameter, tensors in bridge[name]:
        if parameter.startswith("mtp.") or ".mtp" in parameter:
            continue  # it names them by its own layout of prediction layers
        if (name, parameter.removeprefix("decoder.layers.*.")) in NOWHERE:
            continue
        parameter = filled(parameter)
        rule, fields = next(
            ((rule, found) for rule in family_of(name).rules if (found := match(rule, parameter)) is not None),
            (None, None),
        )
        assert rule is not None, f"{parameter} has no rule"
        if "expert" not in fields and ".experts." in parameter:
            fields["expert"] = NUMBERS[1]
        ours = [getattr(rule, key) for key in ("query", "key", "value") if hasattr(rule, key)]
        ours = ours or list(getattr(rule, "tensors", [getattr(rule, "tensor", "")]))
        assert [one.format_map(fields) for one in ours] == [filled(one) for one in tensors], parameter
        compared += 1
    assert compared >= 11
