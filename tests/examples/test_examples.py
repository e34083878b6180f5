"""Each example is run as a user runs it, tiny, with the real frameworks; what it prints shows that versions arrived."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rdt_testbed.programs import SGLANG_ENVIRONMENT, VLLM_ENVIRONMENT, run
from rdt_testbed.warm import Warm

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
PROGRAMS = ("fsdp_to_vllm.py", "megatron_to_sglang.py", "torchrun_trainer.py")
STEPS = 2
TINY = ("--steps", str(STEPS), "--prompts", "4", "--samples", "4", "--max-tokens", "8")
#: float32 sums in another order differ by less; one optimiser step moves log-probabilities by a tenth and more
CLOSE = 1e-4


def example(*arguments: str, environment: dict[str, str], fork: Warm | None) -> list[dict[str, Any]]:
    # the hook of `--setup` is found as a user's own would be
    environment = {**environment, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    found = run(HERE / "example_program.py", *arguments, timeout_s=300, environment=environment, fork=fork)
    lines: list[dict[str, Any]] = found["lines"]
    return lines


def assert_learned_and_served(lines: list[dict[str, Any]]) -> None:
    assert [line["version"] for line in lines] == list(range(STEPS + 1))
    assert [line["served"] for line in lines] == [None, *range(1, STEPS + 1)], "the engine says which version it serves"
    for line in lines:
        assert math.isfinite(line["loss"])
        assert line["logprob_error"] < CLOSE, "trainer and engine give the same log-probabilities to what was sampled"
    assert all(line["grad_norm"] > 0 for line in lines[:-1]), "without a step every version would be the same"
    assert all(line["bytes"] > 0 and line["mode"] == "live" for line in lines[1:])


@pytest.mark.engine
def test_fsdp_to_vllm(warm_vllm: Warm | None) -> None:
    assert_learned_and_served(example("fsdp_to_vllm.py", *TINY, environment=VLLM_ENVIRONMENT, fork=warm_vllm))


@pytest.mark.engine
def test_megatron_to_sglang(warm_sglang: Warm | None) -> None:
    arguments = ("megatron_to_sglang.py", *TINY, "--setup", "hooks:megatron_on_cpu")
    assert_learned_and_served(example(*arguments, environment=SGLANG_ENVIRONMENT, fork=warm_sglang))


@pytest.mark.integration
def test_torchrun_trainers_feed_a_plain_replica(warm_vllm: Warm | None) -> None:
    common = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    lines = example("torchrun", "torchrun_trainer.py", "--steps", str(STEPS), environment=common, fork=warm_vllm)
    assert [line["served"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) and line["bytes"] > 0 for line in lines)
    assert max(line["difference"] for line in lines) < CLOSE, "both compute the same logits"


@pytest.mark.engine
@pytest.mark.thorough  # the same client and the same kind of trainer run in tests/vllm and above
def test_torchrun_trainers_feed_a_server_of_which_they_know_the_url(warm_vllm: Warm | None) -> None:
    arguments = ("torchrun-vllm", "torchrun_trainer.py", "--steps", str(STEPS))
    lines = example(*arguments, environment=VLLM_ENVIRONMENT, fork=warm_vllm)
    assert [line["served"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) and line["bytes"] > 0 for line in lines)


@pytest.mark.unit
@pytest.mark.parametrize("name", [*PROGRAMS, "rollouts.py"])
def test_examples_are_short_and_use_public_names_only(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) < 200
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rdt_"):
            assert "." not in (node.module or ""), f"{node.module} is a room, not a package"
            module = __import__(node.module or "")
            assert {alias.name for alias in node.names} <= set(module.__all__)
        assert not (isinstance(node, ast.Import) and any("testbed" in alias.name for alias in node.names))


@pytest.mark.integration
@pytest.mark.parametrize("name", PROGRAMS)
def test_examples_say_what_they_take(name: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout
    assert "(default: " in done.stdout
