"""Run an exporter on a host that has ranks of an engine but not its EngineCore: it shows their calls and their end.

All numbers of these ranks travel to EngineCore, and are served on its host. The first rank of the host starts the
exporter, and starts it again where it ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING

from kvobs import faults
from kvobs.export.destinations import Setup
from kvobs.export.feed import Feed, describe_engine, feed_to
from kvobs.probe.black_box import STEPS, BlackBox, Identity, pages
from kvobs.schema.options import Options
from kvobs.telemetry.payload.wire import EngineInfo
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

LOOK_S = 1.0
"""Between looks whether the first step has ended."""


class HostFeed:
    """Runs the exporter, in the process of the host's first rank; in the others nothing.

    Where vLLM's configuration does not say what runs on which host, this is decided after the first step: by then
    every process of the engine has its page.
    """

    def __init__(self, vllm_config: VllmConfig, options: Options, box: BlackBox, rank: int) -> None:
        self._vllm_config, self._options = vllm_config, options
        self._box, self._rank = box, rank
        self._feed: Feed | None = None
        self._is_over = False
        self._decide()

    @faults.contained("flush")
    def _decide(self) -> None:
        has_core, of_host = versions.has_core(self._vllm_config), self._vllm_config.parallel_config.local_world_size
        if has_core is None:
            Thread(target=self._begin_after_step, name="kvobs-host-feed", daemon=True).start()
        elif not has_core:
            first = self._rank - self._rank % of_host
            self._begin(range(first, first + of_host), parent=os.getppid())

    @faults.contained("flush")
    def _begin_after_step(self) -> None:
        while not self._is_over and not self._box.words[STEPS]:
            time.sleep(LOOK_S)
        here = {page.rank for _, page in pages(Identity.of(self._vllm_config).pages())}
        if not self._is_over and None not in here:  # the scheduler's
            self._begin(sorted(rank for rank in here if rank is not None))

    @faults.contained("flush")
    def _begin(self, ranks: Sequence[int], parent: int = 0) -> None:
        if not ranks or self._rank != ranks[0]:  # no ranks: their pages could not be written
            return

        def describe() -> EngineInfo:
            described = describe_engine(self._vllm_config, (), self._options, os.getppid())
            return replace(described, ranks=tuple(ranks), has_core=False, parent=parent)

        self._feed = feed_to(Setup(self._options.exporter, has_core=False), self._vllm_config, describe)

    def close(self, *, is_well: bool) -> None:
        """Let the exporter end; ``is_well``: as vLLM asked, and not by an error."""
        self._is_over = True
        if self._feed is not None:
            self._feed.close(is_well=is_well)
