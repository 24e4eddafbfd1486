"""Watch a real engine as an operator does: its log, `top`, `check --server`, the Overview, and the alerts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

from rich.console import Console

from dashboards import looks, questions
from kvobs.cli.running import look
from kvobs.cli.scrapes import fetch
from kvobs.cli.top.live import Watch
from kvobs.cli.top.screen import Picture
from kvobs.testing.server import HOST, Server
from tests.engine.exported import Exported
from tests.engine.prometheus import Prometheus, scraping
from tests.engine.serving import eventually
from tests.incidents.alerts import Recorded, alerts_of
from tests.incidents.known import GUILTY, INNOCENT, PLACES, Incident, Seen, publish
from tests.stack.queries import filled

WIDTH = 100
PATIENCE_S = 60
"""For machines that others share; see ``SEEN_S``."""
LOOKS, AGAIN_S = 3, 5.0
"""How often it is computed which alerts fire, and how long after the time before."""
RESTART_S = 600
STATES = filled(questions.worst_engine(questions.verdict(*questions.by_engine)))
JOBS = """scrape_configs:
  - {{job_name: kvobs, static_configs: [{{targets: {exporters}}}]}}
  - {{job_name: vllm, static_configs: [{{targets: ['{host}:{server}']}}]}}
"""


class Watched:
    """An engine with the connectors `cpu` and `remote`, its exporter, and the Prometheus that scrapes both."""

    def __init__(self, server: Server, port: int, prometheus: Prometheus, log: Path) -> None:
        self.server, self.exported, self.prometheus = server, Exported(server, port), prometheus
        self._log, self._url = log, f"http://{HOST}:{port}/metrics"
        self._watch = Watch(self._url, partial(fetch, self._url), 1.0)
        self.begin()

    @property
    def logged(self) -> int:
        """How many bytes have been logged."""
        return self._log.stat().st_size

    def begin(self, logged: int | None = None) -> None:
        """Let an incident begin now: what was logged before, or in so many bytes, is of another one."""
        self._began, self._begun_at = time.time(), self.logged if logged is None else logged

    def log(self) -> str:
        """Return what has been logged since the incident began."""
        with self._log.open("rb") as log:
            log.seek(self._begun_at)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if "/metrics" not in line)

    def top(self) -> str:
        """Return the screen of `kvobs top`."""
        self._watch.scrape()
        console = Console(width=WIDTH)
        with console.capture() as screen:
            console.print(Picture([self._watch.lately], 1.0))
        return screen.get()

    def check(self) -> str:
        """Return the mistakes that `kvobs check --server` finds."""
        return "\n".join(mistake.found for mistake in look([self._url]).mistakes)

    def overview(self) -> str:
        """Return the column State of the Overview's table."""
        found = self.prometheus.api("query", query=STATES)["result"]
        return "\n".join(f"{s['metric']['connector']}: {looks.VERDICTS[int(s['value'][1])][0]}" for s in found)

    def vllm(self) -> str:
        """Return what vLLM's own metrics show: requests, and whether tokens have been made since the incident began."""
        if not self.prometheus.value('up{job="vllm"}'):
            return "no answer"
        window = max(5, round(time.time() - self._began))
        tokens = f"increase(vllm:generation_tokens_total[{window}s])"
        running, waiting, new = (
            self.prometheus.value(f"sum({query})") or 0
            for query in ("vllm:num_requests_running", "vllm:num_requests_waiting", tokens)
        )
        return f"{running:.0f} running, {waiting:.0f} waiting, {'new' if new else 'no new'} tokens"

    def _has_no_word_about(self, innocent: str) -> None:
        assert f"connector '{innocent}'" not in self.log()
        assert f"connector {innocent}" not in self.check()
        for bad, shown in (
            (rf"(?m)^{innocent} .*\n  (Hangs|Quarantined|Failing|Blocks|Slow)", self.top()),
            (f"(?m)^{innocent}: (?!OK$|Idle$)", self.overview()),
        ):
            assert re.search(bad, shown) is None, shown

    def sees(self, incident: Incident, earlier: Recorded | None = None) -> Recorded:
        """Wait until it is seen everywhere; check that nobody else is named; return the series.

        ``earlier`` are those of the engine's life before, which ended ten minutes before.
        """
        at: dict[str, tuple[str, float]] = {}
        patterns = {place: getattr(incident, place) for place in PLACES if getattr(incident, place)}

        def is_seen() -> bool:
            for place in patterns.keys() - at.keys():
                if found := re.search(patterns[place], getattr(self, place)(), re.MULTILINE):
                    at[place] = found[found.lastindex or 0], round(time.time() - self._began, 1)
            return at.keys() == patterns.keys()

        if not eventually(is_seen, PATIENCE_S):
            missing = patterns.keys() - at.keys()
            raise AssertionError(
                "\n\n".join(f"{patterns[p]!r} is not in {getattr(self, p)()[-2000:]}" for p in missing)
            )
        until = max(time.time() + 2, self._began + incident.looked_at_s)  # until Prometheus has it, and how it grows
        while time.time() < until:
            for innocent in {GUILTY, INNOCENT} - {incident.guilty}:
                self._has_no_word_about(innocent)
            time.sleep(0.5)
        for again in range(LOOKS):  # on a starved machine Prometheus has the growth later
            time.sleep(AGAIN_S if again else 0)
            vllm, recorded = self.vllm(), Recorded.of(self.prometheus, self._began, incident.pace)
            fired = alerts_of(recorded.after(earlier, RESTART_S) if earlier else recorded, self._log.parent)
            named = {fire.labels["connector"] for fire in fired if "connector" in fire.labels}
            assert named <= {incident.guilty}, fired
            if not incident.alert or any(fire.name == incident.alert for fire in fired):
                break
        if incident.alert:
            after_s = min((fire.after_s for fire in fired if fire.name == incident.alert), default=float("inf"))
            assert after_s <= incident.within_s, fired
        publish(incident, Seen(at, [(fire.name, fire.after_s) for fire in fired], vllm))
        return recorded


@contextmanager
def watched(server: Server, port: int, folder: Path, *others: int, log: Path | None = None) -> Iterator[Watched]:
    """Let a Prometheus scrape a running engine and its exporters once a second; look at the first exporter's host."""
    Exported(server, port, *others).until_up()
    exporters = [f"{HOST}:{each}" for each in (port, *others)]
    jobs = JOBS.format(host=HOST, exporters=exporters, server=server.port)
    with scraping(Path(mkdtemp(dir=folder)), jobs) as prometheus:  # which knows nothing of an earlier life
        assert eventually(lambda: prometheus.value("sum(up)") == 1 + len(exporters))
        yield Watched(server, port, prometheus, log or server.log)
