"""A trainer and a real vLLM worker on one GPU: the checks of `vllm_program.py` on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.engine]


def test_checksums_equal_the_trainers_and_no_address_changes(
    tiny_model: Path, results: Callable[..., list[Any]]
) -> None:
    cells = "live:mapped:full,live:prepared,snapshot:mapped:sample"
    (result,) = results("vllm_program.py", str(tiny_model), "--every", "--cells", cells)
    assert result["differing_before"] > 0
    assert [cell["differing"] for cell in result["cells"]] == [[], [], []]
    assert [cell["compared"] for cell in result["cells"]] == [3, 3, 3]
    assert not result["addresses_changed"]
