"""`SglangLanding` on stock SGLang models: what lands by hand equals what SGLang's own loader makes of the same checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rdt_testbed.programs import SGLANG_ENVIRONMENT, run
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(warm_sglang: Warm | None) -> dict[str, Any]:
    # a vocabulary that SGLang pads, MLA with its derived matrices, and experts
    return run(
        HERE / "landing_program.py",
        "deepseek-v3",
        json.dumps({"vocab_size": 250}),
        timeout_s=580,
        environment={**SGLANG_ENVIRONMENT, "PYTHONPATH": str(HERE)},
        fork=warm_sglang,
    )


def test_an_actor_answers_beside_its_event_loop(found):
    status = found["status"]
    assert (status["rank"], status["phase"], status["connected"]) == (0, "idle", False)


def test_a_trace_writes_nothing_and_takes_everything(found):
    for entry in found["hand"]:
        assert entry["trace_wrote_nothing"]
        assert entry["not_taken"] == []
        assert entry["in_place"]
        assert entry["engine"].startswith("sglang 0.5")
        assert entry["fills"] >= 2  # the padding of the embeddings and of the head


def test_only_what_is_computed_is_left_out(found):
    for entry in found["hand"]:
        assert all("rotary_emb" in name for name in entry["uncovered_buffers"])


def test_parameters_padding_and_derived_matrices_equal_those_of_the_engines_own_loader(found):
    assert found["oracle_differs"]
    assert len(found["derived"]) == 4  # w_kc and w_vc of two layers
    assert found["equals_disk"] == [True, True, True]


def test_the_engine_computes_with_the_landed_weights(found):
    assert found["generates_equal"] == [True, True, True]


def test_what_cannot_be_traced_is_refused_by_name(found):
    errors = found["errors"]
    assert errors["missing"].startswith("CoverageError: test/0")
    assert "model.layers.1.self_attn.o_proj.weight (0 of" in errors["missing"]
    assert errors["shape"].startswith("TracingError: test/0: load_weights of DeepseekV3ForCausalLM (target)")
    assert found["kept_after_errors"]


def test_repacked_modules_are_refused_by_name_with_the_way_out(found):
    errors = found["errors"]
    for case, why in (("amx", "packed for AMX"), ("packing", "Packing repacks or requantises")):
        assert errors[case].startswith("EngineError: test/0"), errors[case]
        assert "model.layers.1.self_attn.o_proj: " in errors[case]
        assert why in errors[case]
    assert "--cpu-offload-gb" in errors["device"]


def test_a_changed_address_is_an_error(found):
    for case in ("address", "address_at_begin"):
        assert found["errors"][case].startswith(
            "EngineError: test/0: the address of model.layers.1.self_attn.o_proj.weight"
        )
    for case, name in (("derived", "model.layers.1.self_attn.w_kc"), ("buffer", found["moved_buffer"])):
        assert found["errors"][case].startswith(f"EngineError: test/0: the address of {name}")
        assert "changed while its post-load step ran" in found["errors"][case]


def test_loaders_that_end_with_the_post_load_step_are_kept_from_it_while_they_are_traced(found):
    assert found["silenced"] == [None]
    assert not found["still_silenced"]
