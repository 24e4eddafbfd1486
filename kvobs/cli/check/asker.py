"""Get what vLLM says of a configuration's classes: kept answers at once, others from a process that imports vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvobs.cli.check import kept, vllm_source
from kvobs.cli.check.asking import Asking, Question, here
from kvobs.cli.check.facts import Answer, has_hisparse
from kvobs.cli.check.rewrite import rewrite
from kvobs.config import PATH

Ask = Callable[[Sequence[Question]], "list[Answer]"]
"""Returns what vLLM says of each entry, or raises ``NoAnswerError``."""


def ask_here(questions: Sequence[Question]) -> list[Answer]:
    """Ask vLLM in this process, which imports it."""
    return [answer for answer, _ in here(questions)]


def questions_of(whole: Mapping[str, Any]) -> list[tuple[int, Question]]:
    """Return the questions about a configuration with a router, with the positions of their entries."""
    extra = whole.get(PATH)
    listed = extra.get("connectors") if isinstance(extra, Mapping) else None
    listed = listed if isinstance(listed, list | tuple) else ()
    is_there = has_hisparse(listed)
    return [
        (i, (entry, is_there))
        for i, entry in enumerate(listed)
        if isinstance(entry, Mapping) and isinstance(entry.get("kv_connector"), str) and entry["kv_connector"]
    ]


class Asker:
    """Asks about a configuration: what is known from earlier at once, all else in a process that imports vLLM.

    That process starts with this object, so that it works while other things are printed.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._known: dict[int, Answer] = {}
        has_vllm = vllm_source.folder() is not None
        self._questions = [question for _, question in questions_of(rewrite(config))] if has_vllm else []
        for i, (entry, is_there) in enumerate(self._questions):
            if (answer := kept.read(entry, has_hisparse=is_there)) is not None:
                self._known[i] = answer
        self._open = [i for i in range(len(self._questions)) if i not in self._known]
        asked = [self._questions[i] for i in self._open]
        self._asking = Asking(asked) if asked and "vllm" not in sys.modules else None

    @property
    def is_waiting(self) -> bool:
        """Return whether vLLM has to be imported."""
        return self._asking is not None

    def answers(self, _: Sequence[Question]) -> list[Answer]:
        """Return the answers, waiting for those that are missing; ``NoAnswerError`` if there are none."""
        asked = [self._questions[i] for i in self._open]
        if asked:
            given = here(asked) if self._asking is None else self._asking.answers()
            for i, (answer, files) in zip(self._open, given, strict=True):
                entry, is_there = self._questions[i]
                kept.keep(entry, answer, files, has_hisparse=is_there)
                self._known[i] = answer
            self._open = []
        return [self._known[i] for i in range(len(self._questions))]

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._asking is not None:
            self._asking.stop()
