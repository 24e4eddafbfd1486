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
from kvobs.export import destinations
from kvobs.export.feed import Feed, describe_engine, with_exporter
from kvobs.probe.black_box import SCHEDULER, STEPS, BlackBox, Identity, places
from kvobs.schema.options import Options
from kvobs.vllm_api import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvobs.connectors.specs import ChildSpec

LOOK_S = 1.0
"""Between looks whether the first step has ended."""


class HostFeed:
    """Runs the exporter, in the process of the host's first rank; in the others nothing.

    Where vLLM's configuration does not say what runs on which host, this is decided after the first step: by then
    every process of the engine has its page.
    """

    def __init__(
        self, vllm_config: VllmConfig, specs: Sequence[ChildSpec], options: Options, box: BlackBox, rank: int
    ) -> None:
        self._parts = vllm_config, specs, options
        self._box, self._rank = box, rank
        self._feed: Feed | None = None
        self._is_over = False
        self._decide()

    @faults.contained("flush")
    def _decide(self) -> None:
        has_core, parallel = versions.has_core(self._parts[0]), self._parts[0].parallel_config
        if has_core is None:
            Thread(target=self._begin_after_step, name="kvobs-host-feed", daemon=True).start()
        elif not has_core:
            first = self._rank - self._rank % parallel.local_world_size
            self._begin(range(first, first + parallel.local_world_size), parent=os.getppid())

    @faults.contained("flush")
    def _begin_after_step(self) -> None:
        while not self._is_over and not self._box.words[STEPS]:
            time.sleep(LOOK_S)
        here = places(Identity.of(self._parts[0]).pages())
        if not self._is_over and SCHEDULER not in here:
            self._begin(sorted(int(place.removeprefix("rank")) for place in here))

    @faults.contained("flush")
    def _begin(self, ranks: Sequence[int], parent: int = 0) -> None:
        if not ranks or self._rank != ranks[0]:  # there are none where the pages can't be written
            return
        vllm_config, specs, options = self._parts
        setup = destinations.Setup(options.exporter, has_core=False)
        engine = None
        if setup.running is not None:
            described = describe_engine(vllm_config, specs, options, os.getppid())
            here = replace(described, connectors=(), ranks=tuple(ranks), has_core=False, parent=parent)
            engine = with_exporter(here, vllm_config, setup.running, None)
        destinations.announce(setup, engine)
        self._feed = Feed(engine) if engine is not None else None

    def close(self, *, is_well: bool) -> None:
        """Let the exporter end; ``is_well``: as vLLM asked, and not by an error."""
        self._is_over = True
        if self._feed is not None:
            self._feed.close(is_well=is_well)
