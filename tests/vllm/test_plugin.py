from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rdt_vllm
from rdt_testbed.warm import Warm

pytestmark = pytest.mark.integration

CHECK = """
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
from {package}.plugin import register
register()
register()
engine = Factory._registry["rdt"]()
assert engine.__module__ == "{package}.engine", engine
assert engine.__name__ == "RdtWeightTransferEngine"
assert not engine.supports_draft_weight_update
"""


def process(code: str, fork: Warm | None) -> subprocess.CompletedProcess[str]:
    """In a process that has vLLM, but nothing of rdt's, imported."""
    python = fork.python if fork else sys.executable
    return subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=300)


def test_vllm_finds_the_plugin_by_its_entry_point():
    points = {point.name: point for point in entry_points(group="vllm.general_plugins")}
    assert points["rdt"].load() is importlib.import_module("rdt_vllm.plugin").register


@pytest.mark.parametrize("package", ["rdt_vllm", "vendored.weights"])
def test_registering_twice_is_harmless_and_a_vendored_copy_registers_itself(package, tmp_path, warm_vllm):
    if package != "rdt_vllm":
        target = tmp_path / Path(*package.split("."))
        shutil.copytree(Path(rdt_vllm.__file__).parent, target)
        (tmp_path / "vendored" / "__init__.py").touch()
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + CHECK.format(package=package)
    done = process(code, warm_vllm)
    assert done.returncode == 0, done.stderr[-3000:]


ENGINE = """
import types
from rdt_vllm.engine import RdtWeightTransferEngine
parallel = types.SimpleNamespace(enable_eplb=True)
config = types.SimpleNamespace(parallel_config=parallel, model_config=None)
try:
    RdtWeightTransferEngine(None, config, "cpu", None)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_expert_load_balancing_is_refused_with_the_way_out(warm_vllm):
    done = process(ENGINE, warm_vllm)
    assert "EngineError" in done.stdout, done.stderr[-3000:]
    assert "--enable-eplb" in done.stdout
