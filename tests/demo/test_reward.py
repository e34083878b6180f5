"""The reward of the demo, and the advantages that are learnt from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdt_core.demo import reward as module
from rdt_core.demo.reward import SUBJECTS, advantages, encode_prompts, reward

pytestmark = pytest.mark.unit


def test_the_share_of_different_words_counts() -> None:
    assert reward("She sells sea shells, so some say, slowly.") == 1.0
    assert reward("Sun sun sun sun sun sun sun sun") == 1 / 8
    assert reward("Nothing here begins that way at all, no.") == 0.0


def test_short_texts_earn_little() -> None:
    assert reward("sun") == 1 / module.LEAST_WORDS
    assert reward("") == 0.0


@given(st.text())
def test_rewards_lie_between_zero_and_one(text: str) -> None:
    assert 0.0 <= reward(text) <= 1.0


@given(st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=6))
def test_advantages_are_relative_to_their_group(groups: list[list[float]]) -> None:
    result = advantages([value for group in groups for value in group], 4)
    for index, group in enumerate(groups):
        mine = result[4 * index : 4 * index + 4]
        assert sum(mine) == pytest.approx(0, abs=1e-6)
        order = sorted(range(4), key=lambda place: group[place])
        assert [mine[place] for place in order] == sorted(mine)


def test_equal_rewards_teach_nothing() -> None:
    assert advantages([0.5] * 4, 4) == [0.0] * 4


class _Chat:
    """A tokenizer of characters with a chat template."""

    chat_template = "x"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]


def test_prompts_use_the_chat_template_without_special_tokens_of_their_own() -> None:
    prompts = encode_prompts(_Chat(), 3)
    texts = ["".join(map(chr, prompt)) for prompt in prompts]
    assert len(set(texts)) == 3
    assert all(text.startswith("<system>") and text.endswith("<assistant>") for text in texts)
    assert all(subject in text for subject, text in zip(SUBJECTS, texts, strict=False))


def test_prompts_without_a_template_are_the_question() -> None:
    plain = _Chat()
    plain.chat_template = ""
    assert encode_prompts(plain, 1)[0][:6] == [0, *map(ord, "Write")]
