"""The demo's load: many questions about a few documents, in rounds between which caches are emptied.

How each connector comes to serve, for certain, in the order cpu, disk:
- OffloadingConnector (cpu) finds any prefix it has seen, block by block; ExampleConnector (disk) only whole prompts.
  So a new question about a known document is served by cpu alone.
- Emptying the connectors' caches empties cpu; ExampleConnector has no such hook and its files stay. So the same
  question after that is a miss for cpu and is served by disk.
"""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from kvobs.testing.server import Completion, Server

BLOCK = 32
"""Tokens in a block: the only size that vLLM's CPU attention and all its versions agree on."""

ANSWER_TOKENS = 12


@dataclass(frozen=True)
class Round:
    """One pass over all documents with one of two sets of questions, after emptying caches.

    ``says`` names the connector that serves it, and the reason; ``empties`` names vLLM's own prefix cache, `vllm`, and
    the caches of those connectors that can empty theirs, `connectors`.
    """

    title: str
    says: str
    questions: int
    empties: tuple[str, ...] = ()


ROUNDS = (
    Round("first questions", "computed, and saved by both", 0),
    Round("other questions", "vLLM's cache reset: cpu serves", 1, ("vllm",)),
    Round("first questions again", "cpu reset too: disk serves", 0, ("vllm", "connectors")),
    Round("other questions again", "cpu serves, disk had more", 1, ("vllm",)),
)


@dataclass(frozen=True)
class RoundResult:
    round: Round
    seconds: float
    prompt_tokens: int
    answers: dict[str, tuple[int, ...]]
    """Token ids by prompt."""


def run_rounds(
    server: Server,
    requests: int,
    *,
    concurrency: int = 4,
    on_answer: Callable[[Round, int, int], None] = lambda _round, _done, _total: None,
) -> Iterator[RoundResult]:
    """Send about `requests` requests in four rounds of equal size, at least one a document; yield each round's result.

    `concurrency` are sent at a time; each begins a trace, as an instrumented client does. `on_answer` is called for
    each answer: round, answers so far, total answers.
    """
    each = max(len(DOCUMENTS), round(requests / len(ROUNDS)))
    for part in ROUNDS:
        if part.empties:
            server.reset_prefix_cache(external="connectors" in part.empties)
        begin = time.monotonic()
        answers: dict[str, Completion] = {}
        pool = ThreadPoolExecutor(concurrency)
        try:
            running = {
                pool.submit(server.complete, prompt, ANSWER_TOKENS, headers=_trace_headers()): prompt
                for prompt in prompts(part.questions, each)
            }
            for done in as_completed(running):
                answers[running[done]] = done.result()
                on_answer(part, len(answers), each)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C or an error: nothing more is sent
        tokens = {prompt: answer.tokens for prompt, answer in answers.items()}
        yield RoundResult(part, time.monotonic() - begin, sum(a.prompt_tokens for a in answers.values()), tokens)


def _trace_headers() -> dict[str, str]:
    return {"traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"}


def differing(results: list[RoundResult]) -> list[str]:
    """Return the prompts that rounds answered differently: none, unless a connector loaded the wrong blocks."""
    answers: dict[str, set[tuple[int, ...]]] = {}
    for result in results:
        for prompt, tokens in result.answers.items():
            answers.setdefault(prompt, set()).add(tokens)
    return [prompt for prompt, different in answers.items() if len(different) > 1]


def prompts(questions: int, count: int) -> list[str]:
    """Return `count` different prompts of a set of questions, the documents in turn."""
    documents = [document(title) for title in DOCUMENTS]
    return [
        whole_blocks_and_a_bit(f"{documents[i % len(documents)]}\n\n{question(questions, i // len(documents))}\nA: ")
        for i in range(count)
    ]


def document(title: str) -> str:
    """Return a document of about 900 characters: some thirty blocks."""
    sections = [f"Section {i} of the {title} handbook describes what to do on day {i}." for i in range(1, 20)]
    return f"{title.upper()}\n\n" + " ".join(sections)[:900]


def question(questions: int, index: int) -> str:
    """Return one question of a set; two to three blocks long, and no two alike."""
    text = QUESTIONS[questions][index % len(QUESTIONS[questions])]
    return f"Q{index + 1}: {text} Please answer in one short sentence and name the section."


def whole_blocks_and_a_bit(prompt: str) -> str:
    """Lengthen a prompt by one character where it would end a single token into a block.

    ExampleConnector looks such a prompt up under another key than it saved it, and would never find it again.
    """
    return prompt + " " if len(prompt) % BLOCK == 1 else prompt


DOCUMENTS = ("pump", "oven", "lift", "mill")

QUESTIONS = (
    ("What has to happen before it is switched on?", "How often does it need care, and of which kind?",
     "What is dangerous about it?", "Which parts wear out first?", "Who may open it, and when?",
     "What does a new colleague have to know?"),
    ("Where would you look if it stopped in the night?", "Which number in here matters most?",
     "What is the difference between this and the last model?", "Can it be left alone for a weekend?",
     "What must never be done with it?", "What would you check in spring?"),
)  # fmt: skip
