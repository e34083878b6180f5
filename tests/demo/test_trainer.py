"""Sharded training equals the same step of one unsharded model, and the comparison of log-probabilities is exact."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rdt_core.demo import trainer as module
from rdt_core.demo.trainer import FsdpTrainer, Sample

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).with_name("trainer_program.py")
LEARNING_RATE = 1e-3
RANKS = 2
SHIFT = 0.25


def _reference_logprobs(model: Any, sample: Sample) -> torch.Tensor:
    tokens = torch.tensor([sample.prompt + sample.response])
    logits = model(tokens).logits[0, len(sample.prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response)[:, None])[:, 0]


def _samples(model: Any) -> list[Sample]:
    """Twenty samples of many lengths, more than a micro batch a rank; the engine's logprobs exact but for one token."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for index in range(20):
        lengths = torch.randint(1, 9, (2,), generator=generator).tolist()
        prompt, response = (tuple(torch.randint(3, 63, (size,), generator=generator).tolist()) for size in lengths)
        empty = Sample(prompt, response, (0.0,) * len(response), 0.0)
        with torch.no_grad():
            logprobs = _reference_logprobs(model, empty).tolist()
        if index == 7:
            logprobs[-1] += SHIFT
        result.append(Sample(prompt, response, tuple(logprobs), float(torch.randn((), generator=generator))))
    return result


def test_two_ranks_learn_what_one_would(checkpoint: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    samples = _samples(model)
    torch.save(samples, tmp_path / "samples")
    files = (tmp_path / "meet", checkpoint, tmp_path / "samples")
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(RANKS), *files, tmp_path / f"rank{rank}"],
        )
        for rank in range(RANKS)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    results = [torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(RANKS)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=module.BETAS, weight_decay=0.0)
    total = sum(len(sample.response) for sample in samples)
    for sample in samples:
        (-sample.advantage * _reference_logprobs(model, sample).sum() / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), module.MAX_GRAD_NORM)
    optimizer.step()

    assert sum(result["before"].tokens for result in results) == total
    for name in ("before", "learnt"):
        errors = [result[name].max_abs_logprob_error for result in results]
        assert errors[0] < 1e-5  # rank 0 has the even samples
        assert errors[1] == pytest.approx(SHIFT, abs=1e-5)
    for result in results:
        assert result["norm"] == pytest.approx(float(norm), rel=1e-4)
        reference = dict(model.named_parameters())
        assert set(result["weights"]) == set(reference)
        for parameter, value in result["weights"].items():
            # Adam divides by the gradient's size: where that is rounding noise, steps differ by up to the rate
            close = torch.isclose(value, reference[parameter], atol=LEARNING_RATE / 50, rtol=0)
            assert close.float().mean() > 0.99, parameter
            assert (value - reference[parameter]).abs().max() <= 2.1 * LEARNING_RATE


def test_a_logprob_that_is_no_number_is_the_largest_error() -> None:
    sample = Sample((1,), (2, 3), (-1.0, float("nan")), 0.0)
    worst = FsdpTrainer._errors(object.__new__(FsdpTrainer), [sample], [torch.tensor([-1.0, -2.0])])
    assert worst == float("inf")
