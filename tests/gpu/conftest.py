"""What tests on a GPU share: the tiny model that engines load, and programs run as processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 500
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder with the configuration of a tiny Qwen3, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def results() -> Callable[..., list[Any]]:
    """Runs a program of this folder, which must end well, and returns what it said in its `RESULT` lines."""

    def run(program: str, *arguments: str) -> list[Any]:
        command = [sys.executable, str(Path(__file__).with_name(program)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        lines = [line.partition("RESULT ") for line in done.stdout.splitlines()]
        return [json.loads(said) for before, mark, said in lines if mark and not before]

    return run
