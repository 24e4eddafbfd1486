"""Start the exporter of a server where its metrics are shown by no API server, and again where it has ended.

The exporter needs nothing but the pages, so it can be restarted at any time: no count changes. It is a process
without vLLM and torch, and not a child process of the engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, get_native_id
from typing import TYPE_CHECKING

from kvobs import faults
from kvobs.export.destinations import exporter_url
from kvobs.log import log
from kvobs.page import files
from kvobs.page.description import Identity
from kvobs.page.layout import STEPS
from kvobs.page.reader import pages
from kvobs.page.writer import PageWriter
from kvobs.schema.config import EXPORTER_VARIABLE
from kvobs.schema.options import ExporterOption, ExporterOptions
from kvobs.vllm_api import versions
from kvobs.vllm_api.proc import cores_of_parent

if TYPE_CHECKING:
    from vllm.config import VllmConfig

AUTO_AFTER_S = 20.0
"""With the option ``auto`` it is started if no API server has announced itself so long after the engine is up."""
BACK_OFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
WELL_AFTER_S = 120.0
"""An exporter that has run so long is started again without delay."""
LOOK_S, START_S = 1.0, 60.0


class Starter:
    """Keeps the exporter of a server running, from a thread of one of the engine's processes.

    ``is_needed`` is asked once a second while it returns None; after True the exporter is started whenever no process
    has its lock. Without ``options`` it is not to be started: then it is logged that it is missing. When this is
    forgotten it ends.
    """

    def __init__(
        self, server: str, options: ExporterOptions | None, is_needed: Callable[[], bool | None], why: str = ""
    ) -> None:
        self._server, self._options, self._is_needed, self._why = server, options, is_needed, why
        self._is_over = Event()
        self._starts = 0  # since it last ran well
        self._ran_s = 0.0  # when it was last seen to run
        self._began_s = time.monotonic()
        self._start_at = 0.0
        self._needed: bool | None = None
        self._is_announced = not why  # the configuration contains it
        Thread(target=_run, args=(weakref.ref(self), self._is_over), name="kvobs-starter", daemon=True).start()

    def close(self) -> None:
        """Start it no more. It ends when it has shown the last numbers."""
        self._is_over.set()

    @faults.contained("export")
    def tend(self) -> None:
        """Start the exporter if it is needed and does not run; called once a second."""
        if self._needed is None:
            self._needed = self._ask()
            if self._needed and self._options is None:
                log.warning("kvobs's metrics and spans are not exported: %s, and kvobs.exporter is null", self._why)
        if self._needed and self._options is not None:
            self._look(self._options)
        elif self._needed is not None:
            self.close()

    def _ask(self) -> bool | None:
        try:
            return self._is_needed()
        except Exception:
            faults.contain("export")
            return False

    def _announce(self, options: ExporterOptions) -> None:
        """Log once where the metrics are, if the configuration does not contain it."""
        if not self._is_announced and options.port is not None:
            text = (
                "kvobs's exporter serves the metrics at %s, because %s. To reach them from other machines, set "
                "kvobs.exporter.host, or %s=0.0.0.0:%d in the environment"
            )
            url = exporter_url(options.host, options.port, options.web_config)
            log.info(text, url, self._why, EXPORTER_VARIABLE, options.port)
        self._is_announced = True

    def _look(self, options: ExporterOptions) -> None:
        """Start the exporter if it does not run."""
        now = time.monotonic()
        if files.is_held(files.folder(), f"{self._server}{files.EXPORTER}"):
            if now - self._began_s > WELL_AFTER_S:
                self._starts = 0
            self._ran_s = now
            return
        if self._ran_s and now >= self._start_at and self._starts <= len(BACK_OFF_S):
            log.error("kvobs's exporter has exited and is being restarted. No count is lost")
        if now < self._start_at:
            return
        self._starts += 1
        self._ran_s = 0.0
        try:
            start(self._server, options)
            self._announce(options)
        except (OSError, subprocess.SubprocessError) as error:
            if self._starts <= len(BACK_OFF_S):
                again_s = BACK_OFF_S[self._starts - 1]
                log.error("kvobs's exporter can't be started: %s. Retrying in %g s", error, again_s)
        self._began_s = now = time.monotonic()
        self._start_at = now + BACK_OFF_S[min(self._starts, len(BACK_OFF_S)) - 1]


def _run(starter: weakref.ref[Starter], is_over: Event) -> None:
    with suppress(OSError):  # EngineCore's worker may have bound this process to the cores of the model
        os.sched_setaffinity(get_native_id(), cores_of_parent())
    while not is_over.is_set() and (tended := starter()) is not None:
        tended.tend()
        del tended
        is_over.wait(LOOK_S)


def start(server: str, options: ExporterOptions) -> None:
    """Start the exporter of a server; it ends at once if another one runs."""
    # In another session: Ctrl-C in the engine's terminal is for the engine, whose end is the exporter's. What is
    # started here forks, and ends at once. It closes the engine's files itself: thousands of them here would take
    # milliseconds with the GIL held.
    subprocess.run(
        [sys.executable, "-P", "-m", "kvobs.export", json.dumps({"server": server, **options.model_dump()})],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        close_fds=False,
        start_new_session=True,
        env=_environment(),
        check=True,
        timeout=START_S,
    )


def of_scheduler(option: ExporterOption, vllm_config: VllmConfig) -> Starter:
    """Return what starts the exporter from EngineCore's process."""
    identity = Identity.of(vllm_config)
    if isinstance(option, ExporterOptions):
        return Starter(identity.server, option, lambda: True)
    shown = [f"{identity.server}-{identity.number}{files.COLLECTOR}"]
    if option is None:  # it may have been started by hand
        shown.append(f"{identity.server}{files.EXPORTER}")
    options = ExporterOptions() if option == "auto" else None
    return Starter(identity.server, options, _unless_held(*shown), "no vLLM API server exposes them")


def of_worker(option: ExporterOption, vllm_config: VllmConfig, page: PageWriter) -> Starter | None:
    """Return what starts an exporter on a host without EngineCore, in the process of its first rank; else None.

    If vLLM's configuration does not show what runs on which host, this is decided after the first step: by then every
    process of the engine has its page.
    """
    has_core, rank = versions.has_core(vllm_config), page.rank or 0
    on_host = vllm_config.parallel_config.local_world_size
    if has_core or (has_core is False and rank % on_host):
        return None
    identity, words = Identity.of(vllm_config), page.words
    begin = f"{identity.server}-{identity.number}-"
    is_unserved = _unless_held(f"{identity.server}{files.EXPORTER}")

    def is_needed() -> bool | None:
        if has_core is None:
            if not words[STEPS]:
                return None
            here = [other.rank for _, other in pages(begin)]
            if None in here or rank != min(rank for rank in here if rank is not None):
                return False
        return is_unserved() if option is None else True

    options = ExporterOptions() if option == "auto" else option
    return Starter(identity.server, options, is_needed, "EngineCore is on another host")


def _unless_held(*names: str) -> Callable[[], bool | None]:
    """Return a function: False if one of these locks is held, True if it was not within ``AUTO_AFTER_S``, else None."""
    began_s = time.monotonic()

    def ask() -> bool | None:
        if any(files.is_held(files.folder(), name) for name in names):
            return False
        return True if time.monotonic() - began_s >= AUTO_AFTER_S else None

    return ask


def _environment(package: Path = Path(__file__).parents[1]) -> dict[str, str]:
    """Return the environment in which the exporter finds kvobs, wherever this process has found it.

    Python finds installed packages itself; on PYTHONPATH they would come before the standard library.
    """
    environ = dict(os.environ)
    if package.parent.name not in ("site-packages", "dist-packages"):
        paths = [str(package.parent), environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environ
