"""Real engines of two ranks whose stores get wrong bytes: each wrong block is found, its connector and rank are blamed.

Neither kvobs nor a connector is touched: objects are changed in the files of LMCache's server, and by another client of
Mooncake's store.
"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import quote

import numpy as np
import pytest

from kvobs.testing.server import HOST, Completion, Server
from tests.connectors.faults import REUSED, TITLES, Fault, Pages, blank, flip, record, shift
from tests.connectors.servers.served import LMCACHE, MOONCAKE, STORE, Kind, served
from tests.connectors.servers.stores import CHUNK, Store, lmcache_server
from tests.engine.prometheus import Prometheus, expression, scraping
from tests.engine.readings import Growth
from tests.engine.serving import ServedEngine, eventually, importing_tests, prompt

pytestmark = [pytest.mark.connectors, pytest.mark.timeout(1200)]  # engines and stores are started within it

RANKS = ("0", "1")
OUTCOMES = ("match", "lossy", "mismatch", "unknown")
CUT = "cut in half"
PROMPTS, MANY = 4, 14
"""Of a fault, and to fill the engine's cache, so that no block of earlier ones is left in it."""
SETTLED_S = 1.0
"""Until the last objects are in the store, too."""
CORRUPT, ALERT_S = expression("KvobsCorruptLoads"), 120


def cut(pages: Pages) -> None:
    """Leave the first half of each page."""
    for page in pages:
        page[0] = page[0][: page[0].size // 2]


FAULTS: tuple[tuple[str, Fault | None, tuple[str, ...]], ...] = (
    ("none", None, ()),
    *((TITLES[fault], fault, RANKS) for fault in (flip, shift, blank)),
    (f"{TITLES[shift]}, on rank 1 of 2", shift, ("1",)),
    (CUT, cut, RANKS),
)
"""Title, fault, and the ranks whose objects have it."""


class Files:
    """The objects of LMCache's server, in the files behind its memory."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.folder, self._store = folder / "objects", store

    @staticmethod
    def server(folder: Path) -> Store:
        return lmcache_server(folder, "--l2-adapter", json.dumps({"type": "fs", "base_path": str(folder / "objects")}))

    @staticmethod
    def rank_of(name: str) -> str:
        return str(int(name.split("@")[1], 16) >> 16 & 0xFF)

    def names(self) -> set[str]:
        return {path.name for path in self.folder.glob("*.data")}

    def fetch(self, names: Sequence[str]) -> None:
        """Do nothing: the objects are files already."""

    def renew(self, names: Sequence[str]) -> None:
        """Clear the server's cache in memory, so that it reads the files."""
        urllib.request.urlopen(f"http://{HOST}:{self._store.http_port}/cache/clear", b"", timeout=30).close()


class Copies:
    """The objects of Mooncake's store, copied by another client of it."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.folder, self._store = folder / "objects", store
        self.folder.mkdir()

    @staticmethod
    def rank_of(name: str) -> str:
        return re.findall(r"tp_rank%3A(\d+)", name)[0]

    def names(self) -> set[str]:
        with urllib.request.urlopen(f"http://{HOST}:{self._store.http_port}/get_all_keys", timeout=10) as answer:
            return {quote(key, safe="") for key in answer.read().decode().split()}

    def fetch(self, names: Sequence[str]) -> None:
        self._run("get", names)

    def renew(self, names: Sequence[str]) -> None:
        self._run("put", names)

    def _run(self, verb: str, names: Sequence[str]) -> None:
        words = [verb, f"{HOST}:{self._store.port}", str(self.folder), *names]
        command = [sys.executable, "-m", "tests.connectors.servers.mooncake_objects", *words]
        subprocess.run(command, env=os.environ | importing_tests("mooncake"), check=True, timeout=120)


KINDS: dict[str, tuple[Kind, Callable[[Store, Path], Files | Copies]]] = {
    "LMCacheMPConnector": (replace(LMCACHE, server=Files.server), Files),
    "MooncakeStoreConnector": (MOONCAKE, Copies),
}


class Asked:
    """Prompts that an engine computes, and how many blocks of them it loads when they are asked again."""

    def __init__(self, server: Server, title: str, prompts: int = PROMPTS) -> None:
        self._server, self._prompts = server, [prompt(title, number) for number in range(prompts)]
        answers = self._ask()
        self._tokens = [answer.tokens for answer in answers]
        self.blocks = sum((answer.raw["usage"]["prompt_tokens"] - 1) // CHUNK for answer in answers) * len(RANKS)

    def again(self) -> bool:
        """Ask once more, and return whether the answers are the same."""
        return [answer.tokens for answer in self._ask()] == self._tokens

    def _ask(self) -> list[Completion]:
        return [self._server.complete(text, 2) for text in self._prompts]


def saved(objects: Files | Copies, known: set[str], blocks: int) -> list[str]:
    """Return the names of new objects, as soon as all of so many blocks are in the store."""
    assert eventually(lambda: len(objects.names() - known) >= blocks)
    time.sleep(SETTLED_S)
    return sorted(objects.names() - known)


def change(objects: Files | Copies, names: Sequence[str], fault: Fault) -> None:
    """Put a fault into objects of a store."""
    objects.fetch(names)
    paths = [objects.folder / name for name in names]
    pages = [[np.frombuffer(path.read_bytes(), np.uint8).copy()] for path in paths]
    fault(pages)
    for path, (page,) in zip(paths, pages, strict=True):
        path.write_bytes(page.tobytes())
    objects.renew(names)


def see(connector: str, title: str, ranks: Sequence[str], asked: Asked, server: Server) -> set[str]:
    """Load the blocks, and return the blamed ranks; AssertionError unless all wrong ones are found, and no others."""
    server.reset_prefix_cache()
    with Growth(server) as grown:
        begin = time.monotonic()
        is_right = asked.again()
        assert title == CUT or grown.reaches(asked.blocks, "kvobs_verified_blocks_total")
        seconds = time.monotonic() - begin
    outcomes = {name: grown("kvobs_verified_blocks_total", connector=STORE, outcome=name) for name in OUTCOMES}
    wrong = grown("kvobs_load_tokens_total", connector=STORE) // CHUNK * len(ranks)
    blamed = {rank for rank in RANKS if grown("kvobs_corrupt_blocks_total", connector=STORE, rank=rank)}
    print(f"{connector}, {title}: {wrong} wrong, {outcomes}, {blamed} after {seconds:.1f} s")
    record(connector, title, int(wrong), outcomes, ranks=blamed, at="two ranks", seconds=round(seconds, 1))
    assert outcomes["lossy"] + outcomes["mismatch"] == wrong
    assert is_right or wrong
    assert title == TITLES[flip] or not outcomes["lossy"]
    assert title == CUT or sum(outcomes.values()) == grown("kvobs_verified_blocks_total") == asked.blocks
    assert title == TITLES[flip] or blamed == set(ranks if wrong else ())
    return blamed


def is_alerted(prometheus: Prometheus, ranks: set[str]) -> bool:
    """Say whether the alert fires about these ranks of the store's connector, and nothing else."""
    labels = [series["metric"] for series in prometheus.api("query", query=CORRUPT)["result"]]
    return {(each["connector"], each["rank"]) for each in labels} == {(STORE, rank) for rank in ranks}


@pytest.mark.parametrize("connector", KINDS)
def test_every_wrong_block_is_found(connector: str, served_engine: ServedEngine, tmp_path: Path) -> None:
    (kind, objects_of), late = KINDS[connector], tmp_path / "late"
    options = {"cls": "LateMooncakeStore", "late": str(late)} if kind is MOONCAKE else {}
    with served(served_engine, tmp_path, kind, is_best_effort=False, ranks=len(RANKS), **options) as engine:
        server, objects = engine.server, objects_of(engine.store, tmp_path)
        jobs = f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ['{HOST}:{server.port}']}}]}}]"
        with scraping(Path(mkdtemp(dir=tmp_path)), jobs) as prometheus:
            blamed = set[str]()
            for title, fault, ranks in FAULTS:
                known, asked = objects.names(), Asked(server, title)
                names = saved(objects, known, asked.blocks)
                if fault is not None:
                    change(objects, [name for name in names if objects.rank_of(name) in ranks], fault)
                blamed |= see(connector, title, ranks, asked, server)
                assert eventually(partial(is_alerted, prometheus, blamed), ALERT_S)
        if kind is MOONCAKE:
            late.touch()
            known, asked, others = objects.names(), Asked(server, REUSED), Asked(server, "others", MANY)
            late.unlink()
            saved(objects, known, asked.blocks + others.blocks)
            see(connector, REUSED, RANKS, asked, server)
