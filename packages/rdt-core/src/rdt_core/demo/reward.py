"""The task of the demo: prompts, and a reward that is computed from the text alone.

The model is asked for sentences rich in words with one initial letter. The reward is the share of *different* words
with that letter, so that repeating one word, or writing almost nothing, earns little. A small model starts near 0.1
and learns it within a few steps, which makes a version that did not arrive visible in the curve as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

LETTER = "s"
#: shorter texts are counted as if they had this many words, so that one lucky word is no perfect score
LEAST_WORDS = 8
SYSTEM = "You write one short sentence."
SUBJECTS = (
    "the sea", "a forest", "summer", "a small town", "music", "the night sky", "a school day", "winter",
    "cooking", "a storm", "a garden", "the city", "friendship", "a long trip", "birds", "a river",
)  # fmt: skip

_WORD = re.compile(r"[a-z']+")


def question(subject: str) -> str:
    """Returns what the user of the chat asks."""
    return f"Write about {subject}. Use many words that start with the letter {LETTER}."


def reward(text: str) -> float:
    """Returns the share of a text's words that are different ones with the initial `LETTER`, between 0 and 1."""
    words = _WORD.findall(text.lower())
    return len({word for word in words if word.startswith(LETTER)}) / max(len(words), LEAST_WORDS)


def encode_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Returns the token ids of the first `count` prompts, through the tokenizer's chat template where it has one."""
    prompts = []
    for subject in SUBJECTS[:count]:
        if tokenizer.chat_template:
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(subject)}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompts.append(list(tokenizer.encode(text, add_special_tokens=False)))
        else:
            prompts.append(list(tokenizer.encode(question(subject))))
    return prompts


def advantages(rewards: Sequence[float], samples: int) -> list[float]:
    """Returns each reward relative to its own prompt: minus the group's mean, over the group's standard deviation.

    Args:
        rewards: prompt by prompt, `samples` of each.
        samples: size of a group, at least 2.

    Returns:
        A list of the same length; zeros for a group whose rewards are all equal.
    """
    result: list[float] = []
    for start in range(0, len(rewards), samples):
        group = rewards[start : start + samples]
        mean = sum(group) / samples
        deviation = (sum((value - mean) ** 2 for value in group) / (samples - 1)) ** 0.5
        result.extend((value - mean) / (deviation + 1e-4) for value in group)
    return result
