"""Every trainer with every engine: real syncs whose outcome equals the engine's own load of a checkpoint from disk.

Each engine starts once and serves all trainers of its cells, one after the other: when FSDP's group has left, Megatron's
takes the same engine over. `ci/matrix` runs chosen cells. The layouts re-shard: no rank of a trainer holds what one of
the engine does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rdt_testbed.programs import SGLANG_ENVIRONMENT, VLLM_ENVIRONMENT, run

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).with_name("matrix_program.py")
TP = 2
ENVIRONMENTS = {"vllm": VLLM_ENVIRONMENT, "sglang": SGLANG_ENVIRONMENT}
TRAINERS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    # experts over both dimensions: a rank holds half of the experts of half of the layers, whole
    "megatron": {
        "qwen3-moe": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
        "qwen3": {"tp": 2, "pp": 2},
        "glm4-moe": {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
    },
}
RANKS = {"fsdp": 2, "megatron": 4}
#: experts, grouped heads, norms of queries and keys: one family holds most of what can go wrong. The last one adds biases, a
#: dense layer before those of experts, shared experts, and a router whose bias two modules of an engine hold
KINDS = {"qwen3-moe": (), "qwen3": (pytest.mark.thorough,), "glm4-moe": (pytest.mark.thorough,)}
CELLS = [
    pytest.param(trainer, engine, kind, id="-".join([trainer, engine, *([kind] if marks else [])]), marks=marks)
    for kind, marks in KINDS.items()
    for engine in ENVIRONMENTS
    for trainer in TRAINERS
]


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Callable[[str, str], dict[str, Any]]:
    """What one run of an engine, with a model of a kind, found for the trainers of the selected cells."""
    selected = [
        item.callspec.params  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == Path(__file__) and not any(item.iter_markers("skip"))
    ]
    found: dict[tuple[str, str], dict[str, Any] | AssertionError] = {}

    def engine(name: str, kind: str) -> dict[str, Any]:
        if (name, kind) not in found:
            names = [one["trainer"] for one in selected if (one["engine"], one["kind"]) == (name, kind)]
            trainers = [{"name": one, "layout": TRAINERS[one].get(kind)} for one in names]
            settings = {"engine": name, "tp": TP, "kind": kind, "changes": {"vocab_size": 250}, "trainers": trainers}
            warm = request.getfixturevalue(f"warm_{name}")
            try:
                found[name, kind] = run(
                    PROGRAM, json.dumps(settings), timeout_s=580, environment=ENVIRONMENTS[name], fork=warm
                )
            except AssertionError as error:
                found[name, kind] = error
        outcome = found[name, kind]
        if isinstance(outcome, AssertionError):
            raise outcome
        return outcome

    return engine


@pytest.mark.parametrize(("trainer", "engine", "kind"), CELLS)
def test_syncs_equal_a_load_from_disk(
    trainer: str, engine: str, kind: str, engines: Callable[[str, str], dict[str, Any]]
) -> None:
    found = engines(engine, kind)
    assert found["engine"].startswith(engine)
    cell = found["cells"][trainer]
    assert cell["ranks"] == RANKS[trainer]
    assert [(sync["modes"], sync["kinds"]) for sync in cell["syncs"]] == [
        (["live"], ["mapped"]),
        (["bucket"], ["prepared"]),
    ]
    for sync in cell["syncs"]:
        assert sync["said"] == sync["version"], sync
        assert sync["sources"] == RANKS[trainer]
        assert sync["readers"] == TP
        for check in ("parameters_equal", "generates_equal", "other_differs"):
            assert sync[check], (check, sync)
