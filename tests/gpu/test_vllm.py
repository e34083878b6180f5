"""A trainer and a real vLLM worker on one GPU: the checks of `vllm_program.py` on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.engine]

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip


def test_checksums_equal_the_trainers_and_no_address_changes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    program = Path(__file__).with_name("vllm_program.py")
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            str(tmp_path),
            "--every",
            "--cells",
            "live:mapped:full,live:prepared,snapshot:mapped:sample",
        ],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT ")
    )
    assert result["differing_before"] > 0
    assert [cell["differing"] for cell in result["cells"]] == [[], [], []]
    assert [cell["compared"] for cell in result["cells"]] == [3, 3, 3]
    assert not result["addresses_changed"]
