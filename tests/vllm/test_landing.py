"""`VllmLanding` on stock vLLM models: what lands by hand equals what vLLM's own loader makes of the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rdt_testbed.programs import VLLM_ENVIRONMENT, run
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).with_name("landing_program.py")
CASES = {
    "llama": {},
    "llama-tied": {"vocab_size": 250},  # vLLM pads the vocabulary to 256 rows
    # biases, norms of queries and keys; experts share the router's correction bias with the gate
    "glm4-moe": {"num_hidden_layers": 3},
    "qwen3": {},
    "qwen3-moe": {},
}
#: what these have is in the others as well
THOROUGH = ("llama", "qwen3", "qwen3-moe")


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[pytest.mark.thorough] * (one in THOROUGH), id=one) for one in CASES],
)
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm_vllm: Warm | None
) -> dict[str, Any]:
    kind = request.param
    return run(
        PROGRAM,
        kind,
        str(tmp_path_factory.mktemp(kind)),
        json.dumps(CASES[kind]),
        timeout_s=400,
        environment={**VLLM_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        fork=warm_vllm,
    )


def test_a_trace_writes_nothing_and_leaves_no_loader_wrapped(found):
    assert found["trace_wrote_nothing"]
    assert found["loaders_restored"]
    assert found["all_taken"]


def test_it_keeps_the_protocol_of_landings(found):
    assert found["conformance"] == "nothing"


def test_only_modules_without_a_post_load_step_land_in_place(found):
    # on a CPU vLLM packs every matrix, the embeddings' too; biases of any module stay what the kernels use
    assert all("norm" in key or key.endswith("bias") for key in found["in_place"])
    assert found["in_place"]
    assert not any("norm" in key for key in found["moved"])


def test_parameters_equal_those_of_the_engines_own_loader(found):
    assert found["oracle_differs"]
    assert found["equals_loader"] == [True, True, True]


def test_the_engine_computes_with_the_landed_weights(found):
    # packed copies of matrices show only here; the receive memory was overwritten after every module
    assert max(found["log_probability_error"]) < 1e-4
    assert min(found["wrong_model_error"]) > 0.1


def test_no_address_changes(found):
    assert found["addresses_kept"]
    assert found["torn_after"] is None
    error = found["errors"]["address"]
    assert error.startswith("EngineError")
    assert found["moved_parameter"] in error
    error = found["errors"]["address_at_begin"]
    assert error.startswith(f"EngineError: test/0: the address of {found['moved_buffer']}")
    assert error.endswith("changed since it connected; connect it again")


def test_what_cannot_be_traced_is_refused_by_name(found):
    errors = found["errors"]
    assert errors["missing"].startswith("CoverageError")
    assert "model.layers.1.self_attn.qkv_proj.weight" in errors["missing"]
    assert "elements" in errors["missing"]
    assert errors["unknown"].startswith("TracingError")
    assert "layers.9" in errors["unknown"]
    assert errors["shape"].startswith("TracingError")
    assert "o_proj" in errors["shape"]


def test_a_module_that_is_loaded_and_shares_memory_is_not_post_processed_twice(found):
    assert "load-time form while it is in it" in found["errors"]["opened_twice"]
    if found["kind"] == "glm4-moe":
        error = found["errors"]["half_tied"]
        assert error.startswith("EngineError: test/0: model.layers.2.mlp.experts.routed_experts.w2_weight shares")
        assert "model.layers.1.mlp.experts.routed_experts.w2_weight" in error


def test_a_refused_trace_leaves_the_engine_as_it_was(found):
    assert found["kept_after_errors"]
    assert found["serves_after_errors"] < 1e-4


def test_a_torn_model_refuses_to_generate_until_a_complete_sync(found):
    for moment in ("forward_in_sync", "forward_torn", "logits_torn"):
        assert found["errors"][moment].startswith("TornReplicaError: test/0"), moment
    assert "the trainer died" in found["errors"]["forward_torn"]
    assert found["torn"] == "the trainer died"
    assert found["addresses_kept_torn"]
    assert found["healed"]
    assert found["healed_error"] < 1e-4
    assert found["hooks_gone"]
