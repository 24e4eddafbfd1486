"""Ask vLLM's classes about configured connectors, in a process of its own: importing vLLM takes seconds and says much.

As a program it reads the entries from standard input and writes the answers, and the files that they depend on, to
standard output, both as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvobs.cli.check.facts import Answer, as_dict, from_dict
from kvobs.cli.check.kept import Stamp, stamps

_PROGRAM = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from kvobs.cli.check.asking import main; main()"
Question = tuple[Mapping[str, Any], bool]
"""An entry, and whether a HiSparseConnector is beside it."""


class NoAnswerError(Exception):
    """vLLM can't be imported here."""


def here(questions: Sequence[Question]) -> list[tuple[Answer, dict[str, Stamp]]]:
    """Ask in this process; return each answer, and the files that it depends on with their stamps."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from kvobs.cli.check.class_facts import answer

    answers = [answer(entry, has_hisparse=has_hisparse) for entry, has_hisparse in questions]
    return [(given, stamps(given.bases)) for given in answers]


class Asking:
    """Questions that a process of its own is answering."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 lives as long as the process
        environment = {"VLLM_LOGGING_LEVEL": "ERROR", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as entries:  # what was wrong is known by the answer
            entries.write(json.dumps(list(questions)).encode())

    def answers(self) -> list[tuple[Answer, dict[str, Stamp]]]:
        """Wait for the answers.

        Raises:
            NoAnswerError: the process failed; with the last line that it printed.
        """
        try:
            assert self._process.stdout is not None
            output = self._process.stdout.read()
            self._process.wait()
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").split("\n")
        finally:
            self.stop()
        with suppress(ValueError, KeyError, TypeError):
            if self._process.returncode == 0:
                return [
                    (from_dict(answer), {path: Stamp(*stamp) for path, stamp in files.items()})
                    for answer, files in json.loads(output)
                ]
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        raise NoAnswerError(f"{last[:300]} (exit status {self._process.returncode})")

    def stop(self) -> None:
        """End the process, if it runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for file in (self._process.stdout, self._said):
            if file is not None:
                file.close()


def main() -> None:
    """Answer the questions on standard input."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM and its plugins print is not the result
    logging.disable(logging.WARNING)
    questions = json.load(sys.stdin)
    with results:
        json.dump([(as_dict(answer), files) for answer, files in here(questions)], results)
        results.flush()
        os._exit(0)  # threads of libraries must not hold up the answer
