"""Peer `sharded_rdt` of `rdt bench`: vLLM's own sharded backend in the real vLLM, and `rdt` in the very same engine.

Entry point of group `rdt.bench_peers`. It runs `benchprogram` in a process of its own: one engine with random weights of the
named model's shapes, one trainer after the other, the same bytes. It refuses what it cannot measure honestly: a device that the
stock backend does not run on, layouts that would need more than one GPU, models whose configuration it cannot write.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from rdt_core.bench import BenchOptions, PeerRow
from rdt_core.bench.plugins import run_program
from rdt_core.errors import VersionError
from rdt_core.shapes import Config

from .versions import check_vllm

#: of the whole measurement, in deadlines of a single wait: starting an engine and trainers takes several
_WAITS = 6
#: the last: Ray gives up on a busy machine before it has started
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RAY_raylet_start_wait_time_s": "120"}
_PROGRAM = __name__.rpartition(".")[0] + ".benchprogram"


class ShardedRdt:
    """Measures `sharded_rdt` where it runs as it comes: on one GPU that trainer and engine share."""

    def reason(self, options: BenchOptions) -> str:
        """See `rdt_core.bench.plugins.PeerProvider`."""
        if options.device != "cuda":
            return "vLLM's sharded_rdt moves weights between CUDA devices; --device cuda runs it"
        if options.gpus != "shared" or options.ranks != 1 or options.tp != 1:
            return "measured on one GPU with one trainer: --gpus shared --trainer fsdp:ranks=1 --engine vllm:tp=1"
        return self.lacking(options)

    def lacking(self, options: BenchOptions) -> str:
        """What keeps every device from it; empty if nothing does."""
        if options.engine != "vllm" or options.ep > 1 or options.pp > 1:
            return "it is vLLM's: --engine vllm:tp=N"
        if importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed; pip install 'rdt-vllm[vllm]'"
        try:
            check_vllm()
        except VersionError as error:
            return str(error)
        if hf_config(options.config) is None:
            return f"no vLLM configuration is written for models like {options.model}"
        return ""

    def environment(self, options: BenchOptions) -> dict[str, str]:
        """Of the program and all that it starts."""
        return {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

    @property
    def python(self) -> str:
        """That runs the program and Ray's workers."""
        return sys.executable

    @property
    def prepare(self) -> str:
        """`module:function` that every trainer calls before it uses vLLM; empty: nothing."""
        return ""

    @property
    def extension(self) -> str:
        """Qualified name of the class that extends vLLM's workers, `benchprogram.Switch` or one below it."""
        return f"{_PROGRAM}.Switch"

    def measure(self, options: BenchOptions) -> Sequence[PeerRow]:
        """See `rdt_core.bench.plugins.PeerProvider`."""
        request = {
            "config": hf_config(options.config), "model": options.model, "layers": options.layers, "ranks": options.ranks,
            "tp": options.tp, "device": options.device, "rounds": options.peer_rounds, "timeout_s": options.timeout_s,
            "prepare": self.prepare, "extension": self.extension, "python": self.python if self.python != sys.executable else "",
        }  # fmt: skip
        answer = run_program(
            _PROGRAM,
            request,
            environment={**_ENVIRONMENT, **self.environment(options)},
            timeout_s=_WAITS * options.timeout_s,
            python=self.python,
        )
        return tuple(msgspec.convert(answer, list[PeerRow]))


def hf_config(config: Config) -> dict[str, Any] | None:
    """Returns the `config.json` that makes vLLM build a model with these tensors, in bfloat16; None for other families."""
    if config.kv_lora or config.qkv_bias or config.shared or config.dense_layers or config.router_bias:
        return None
    found: dict[str, Any] = {
        "vocab_size": config.vocabulary, "hidden_size": config.hidden, "intermediate_size": config.intermediate,
        "num_hidden_layers": config.layers, "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim, "tie_word_embeddings": config.tied, "max_position_embeddings": 512, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    if config.experts:
        if not config.qk_norm:
            return None
        return found | {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": config.experts,
            "num_experts_per_tok": min(8, config.experts), "moe_intermediate_size": config.expert_intermediate,
            "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
        }  # fmt: skip
    if config.qk_norm:
        return found | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    return found | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
