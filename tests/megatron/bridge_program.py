"""Run by test_bridge.py in a process of its own: prints megatron-bridge's tables of names, without TransformerEngine.

The bridge imports TransformerEngine wherever it goes; what only its names are needed of is stood in for. One JSON object:
for each family pairs of a Megatron parameter and checkpoint tensors, with `*` for layers and experts.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import json
import sys
import types
from typing import Any

import torch

FAMILIES = {
    "llama": "llama.llama_bridge:LlamaBridge",
    "mistral": "mistral.mistral_bridge:MistralBridge",
    "qwen2": "qwen.qwen2_bridge:Qwen2Bridge",
    "qwen3": "qwen.qwen3_bridge:Qwen3Bridge",
    "qwen3_moe": "qwen.qwen3_moe_bridge:Qwen3MoEBridge",
    "deepseek_v2": "deepseek.deepseek_v2_bridge:DeepSeekV2Bridge",
    "deepseek_v3": "deepseek.deepseek_v3_bridge:DeepSeekV3Bridge",
    "kimi_k2": "kimi.kimi_bridge:KimiK2Bridge",
    "glm4_moe": "glm.glm45_bridge:GLM45Bridge",
}


class Anything(types.ModuleType):
    """A module that has every class and every submodule."""

    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower():
            return importlib.import_module(f"{self.__name__}.{name}")
        made = type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Anything(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def names(bridge: str) -> list[tuple[str, list[str]]]:
    module, _, name = bridge.partition(":")
    made = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), name)()
    if name == "GLM45Bridge":
        from transformers import Glm4MoeConfig

        made.hf_pretrained = types.SimpleNamespace(config=Glm4MoeConfig())
        made.hf_config = made.hf_pretrained.config
    found = []
    for mapping in made.mapping_registry().get_all_mappings():
        tensors = mapping.hf_param
        found.append((mapping.megatron_param, list(tensors.values()) if isinstance(tensors, dict) else [tensors]))
    return found


if __name__ == "__main__":
    # Megatron decides by these whether TransformerEngine is there; the stand-in comes after that
    for module in ("models.gpt.gpt_layer_specs", "extensions.transformer_engine"):
        importlib.import_module(f"megatron.core.{module}")
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "0" if "transformer" in name and "engine" in name else version(name)
    print(json.dumps({family: names(bridge) for family, bridge in FAMILIES.items()}), flush=True)
