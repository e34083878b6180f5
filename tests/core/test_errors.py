"""What an error says in a message: Ray's page about a dead actor is a sentence."""

from __future__ import annotations

import pytest

from rdt_core.errors import death_of, text_of

pytestmark = pytest.mark.unit

HEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: ModuleWorker
\tactor_id: dfa48b304167ee836f17cd1201000000
\tpid: 19055
\tnamespace: rdt
\tip: 192.0.2.2
"""
BROKEN = """The actor died because of an error raised in its creation task, \x1b[36mray::W.__init__()\x1b[39m (pid=19144)
           ^^^^^^^^^
  File "worker.py", line 9, in __init__
    if bad: raise ValueError("no such model\\nsecond line")
            ^^^^^^^^^^^^^^^^^^
ValueError: no such model
second line"""


@pytest.mark.parametrize(
    ("dump", "said"),
    [
        (
            HEAD + "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes:",
            "its worker process has died (pid 19055 on 192.0.2.2)",
        ),
        (
            HEAD + "The actor is dead because it was killed by `ray.kill`.",
            "it was killed by `ray.kill` (pid 19055 on 192.0.2.2)",
        ),
        (BROKEN, "ValueError: no such model"),
        ("The actor died.", "The actor died"),
        ("The actor 1f is unavailable: temporarily.\nMore.", "The actor 1f is unavailable: temporarily"),
        ("", "Exception('')"),
    ],
)  # fmt: skip
def test_a_death_is_told_in_a_sentence(dump: str, said: str) -> None:
    assert death_of(Exception(dump)) == said


def test_a_sentence_is_not_endless() -> None:
    assert len(death_of(Exception("x" * 5000))) <= 240


def test_names_of_files_need_not_be_utf8() -> None:
    assert text_of(OSError("no \udcff")) == "no \\udcff"
