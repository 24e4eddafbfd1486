"""What connectors do that vLLM's router does not expect, as scripts, and how many answers come out right of it.

Each pattern is served behind and before a connector that loads what it is chosen for. ``docs/runs.md`` shows
what became of the answers with vLLM's own router and with kvobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvobs.testing import BLOCK, Loaded, Rig, Script

PUBLISH = "KVOBS_STRANGERS"
"""An environment variable: with it, a run replaces the results."""
RESULTS = Path(__file__).parent / "results.json"
"""What the last published run found."""
REQUESTS, STEPS = 15, 60
PROMPT = 4 * BLOCK + 1
GARBAGE = "garbage"
SYNC, ASYNC, FEWER = (3 * BLOCK, False), (3 * BLOCK, True), (BLOCK, True)

Drive = Callable[["Serving"], None]


@dataclass(frozen=True)
class Pattern:
    """One thing that a connector does, which is called the stranger here."""

    what: str
    who: str
    """The real connectors that do it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the stranger's script."""
    offer: tuple[int, bool] = (0, False)
    """Its answer to every lookup."""
    sibling: tuple[int, bool] = SYNC
    """The other connector's answer."""
    breaks: bool = False
    """Whether every second of its loads breaks half-way."""
    drive: Drive | None = None
    """What it does besides, before each step."""
    runner_calls: str = ""
    """The method that a platform's model runner calls on the router."""


@dataclass(frozen=True)
class Outcome:
    """The right answers, of so many, and the error with which an engine ended, if it did."""

    right: int
    of: int
    ended: str = ""

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.right + other.right, self.of + other.of, self.ended or other.ended)


class Serving(Rig):
    """An engine whose blocks have contents: it finds the requests that are computed on wrong ones."""

    def __init__(self, router: str, pattern: Pattern, *, is_behind: bool) -> None:
        self.pattern, self.held, self.wrong = pattern, dict[int, Any](), dict[str, int]()
        names = [f"r{i}" for i in range(REQUESTS)]
        self.prompts = {name: [(i * 13 + k * 7 + 3) % 250 for k in range(PROMPT)] for i, name in enumerate(names)}
        self.sibling = Script("sibling", loads="chosen", takes=3, offers=dict.fromkeys(names, pattern.sibling))
        offers = dict.fromkeys(names, pattern.offer) if pattern.offer[0] else {}
        breaks = set(names[::2]) if pattern.breaks else set()
        self.stranger = Script("stranger", offers=offers, breaks=breaks, **pattern.options)
        self.sibling.on_load = self.stranger.on_load = self._write
        scripts = (self.sibling, self.stranger) if is_behind else (self.stranger, self.sibling)
        super().__init__(router, *scripts)

    def keys(self, request: str, first: int, end: int) -> list[Any]:
        """Return what a request's blocks from ``first`` to ``end`` must hold: it follows from its tokens."""
        tokens = self.scheduler.requests[request].all_token_ids
        return [hash(tuple(tokens[: (i + 1) * BLOCK])) for i in range(first, end)]

    def _write(self, _rank: int, load: Loaded) -> None:
        (blocks,) = load.blocks
        right = self.keys(load.request, load.first, load.first + len(blocks))
        self.held.update(zip(blocks, [GARBAGE] * len(blocks) if load.is_broken else right, strict=True))

    def _forward(self, worker: Any, scheduled: Any) -> None:
        if self.pattern.runner_calls:
            getattr(worker, self.pattern.runner_calls)()
        if scheduled.has_sync_kv_loads:  # as in vLLM's model runners
            super()._forward(worker, scheduled)
        self._compute(scheduled)
        if not scheduled.has_sync_kv_loads:
            super()._forward(worker, scheduled)

    def _compute(self, scheduled: Any) -> None:
        cached = scheduled.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        begins.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request, count in scheduled.num_scheduled_tokens.items():
            (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request)
            first, end = begins[request] // BLOCK, (begins[request] + count) // BLOCK
            right = self.keys(request, 0, first)
            unlike = [block for block, key in zip(blocks, right, strict=False) if self.held.get(block) != key]
            if unlike:
                self.wrong[request] = unlike[0]
            computed = [GARBAGE] * (end - first) if unlike else self.keys(request, first, end)
            self.held.update(zip(blocks[first:end], computed, strict=True))

    def step(self) -> Any:
        output = super().step()
        for request, block in [*self.wrong.items()]:
            if block in (output.invalid_block_ids or ()):  # vLLM computes it once more
                del self.wrong[request]
        return output

    def serve(self) -> Outcome:
        """Let a request come in every second step; count those that are answered, and were computed on right blocks."""
        answered, ended = set[str](), ""
        try:
            for step in range(STEPS):
                if step % 2 == 0 and step // 2 < REQUESTS:
                    name = f"r{step // 2}"
                    self.add(name, self.prompts[name], max_tokens=3)
                if self.pattern.drive is not None:
                    self.pattern.drive(self)
                self.step()
                answered |= {each.request_id for each in self.request_outputs if each.finish_reason is not None}
        except Exception as error:
            ended = type(error).__name__
        return Outcome(len(answered - self.wrong.keys()), REQUESTS, ended)


def served(router: str, pattern: Pattern) -> Outcome:
    """Return what came of a pattern with the stranger behind its sibling and before it."""
    return Serving(router, pattern, is_behind=True).serve() + Serving(router, pattern, is_behind=False).serve()


def _loading(serving: Serving) -> Iterator[str]:
    """Yield the requests that wait for a load of the sibling."""
    waiting = [name for name in serving.scheduler.requests if serving.status(name) == "WAITING_FOR_REMOTE_KVS"]
    yield from waiting[:1]


def reports(**ends: bool) -> Drive:
    """Report these ends of loads of the sibling."""

    def drive(serving: Serving) -> None:
        for name in _loading(serving):
            serving.stranger.say(0, **dict.fromkeys(ends, name))

    return drive


def reports_saves(serving: Serving) -> None:
    """Report saves that nobody has promised."""
    for name in [*serving.scheduler.requests][:1]:
        serving.stranger.say(0, saved=name)


def reports_blocks(serving: Serving) -> None:
    """Report blocks as bad that others load, or have computed."""
    for name in [*serving.scheduler.requests][:1]:
        (blocks,) = serving.scheduler.kv_cache_manager.get_block_ids(name)
        serving.stranger.bad_blocks[0] = set(blocks[:1])


def promises(serving: Serving) -> None:
    serving.stranger.promises |= serving.scheduler.requests.keys()


def needs_its_wrapper(serving: Serving) -> None:
    """Raise in each hook that is called without its wrapper, as LMCache does without ATOM's."""

    def check(hook: str, _detail: Any) -> None:
        calls = serving.stranger.calls
        if hook in serving.stranger.wrapped and calls[-2][0] != f"wrapped {hook}":
            raise IndexError(f"{hook} was called without its wrapper")

    serving.stranger.on_call = check


def _own(connector: Any) -> None:
    connector.script.calls.append(("start_load_kv_before_update", None))


def _preempted(self: Any, **kwargs: Any) -> None:
    pass


def _start(self: Any, forward_context: Any, *extra: Any, is_eager: bool = True, **kwargs: Any) -> None:
    assert (extra, is_eager) == ((), True)


def _lookup(self: Any, request: Any, num_computed_tokens: int, *, depth: int = 1) -> tuple[int, bool]:
    return 0, False


def _output(self: Any, connector_output: Any, step: int = 0) -> None:
    assert connector_output.invalid_block_ids is not None


FOUND = {"loads": "found"}
PATTERNS = (
    Pattern("loads unchosen, within a step", "UCM", FOUND, SYNC),
    Pattern("loads unchosen, within a step; half of these loads break", "UCM", FOUND, SYNC, breaks=True),
    Pattern("loads unchosen, after asynchronous loads; half break", "UCM", FOUND, SYNC, ASYNC, breaks=True),
    Pattern("loads unchosen, more than was chosen; half of these loads break", "UCM", FOUND, SYNC, FEWER, breaks=True),
    Pattern("loads unchosen, asynchronously", "Tair", FOUND, ASYNC),
    Pattern("loads unchosen, asynchronously; half of these loads break", "Tair", FOUND, ASYNC, breaks=True),
    Pattern("loads unchosen, during asynchronous loads; half break", "Tair", FOUND, ASYNC, ASYNC, breaks=True),
    Pattern("reports the end of another connector's load", "Tair", sibling=ASYNC, drive=reports(received=True)),
    Pattern("reports another connector's load as failed", "Tair", sibling=ASYNC, drive=reports(failed=True)),
    Pattern("reports blocks as bad that it has not loaded", "UCM", drive=reports_blocks),
    Pattern("reports saves that it has not promised", "MoRIIOConnector", drive=reports_saves),
    Pattern("promises every save and reports none", "AVP", drive=promises),
    Pattern("its hooks are wrapped once it is built", "LMCache with ATOM's plug-in",
            {"wrapped": {"start_load_kv", "request_finished_all_groups"}}, drive=needs_its_wrapper),
    Pattern("the model runner calls a method beyond vLLM's class", "AIBrix, tpu-inference",
            {"hooks": {"start_load_kv_before_update": _own}}, runner_calls="start_load_kv_before_update"),
    Pattern("an empty hook takes no argument of vLLM's", "AVP", {"hooks": {"handle_preemptions": _preempted}}),
    Pattern("hooks have further arguments, some by keyword only", "-",
            {"hooks": {"start_load_kv": _start, "get_num_new_matched_tokens": _lookup,
                       "update_connector_output": _output}}),
    Pattern("works in a separate thread, which its hooks wait for", "NIXL, LMCache",
            {**FOUND, "has_thread": True}, SYNC, breaks=True),
)  # fmt: skip


def row(pattern: Pattern) -> dict[str, Any]:
    """Serve a pattern with both routers; return its row."""
    outcomes = {router: asdict(served(router, pattern)) for router in ("stock", "kvobs")}
    return {"what": pattern.what, "who": pattern.who, **outcomes}


def published() -> dict[str, dict[str, Any]]:
    """Return the rows of the last published run."""
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    return rows
