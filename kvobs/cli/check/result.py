"""The result of a check: properties and findings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvobs.cli.check.rewrite import Router
from kvobs.connectors import validation
from kvobs.connectors.sync_loads import SAFE, Conditions
from kvobs.schema.findings import Finding, Level
from kvobs.schema.options import Options


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a connector class with the connector's configuration; None: known only after building.

    ``layouts`` are the KV cache layouts that it needs, for models without and with MLA.
    """

    class_path: str
    supports_hma: bool
    supports_sleep_mode: bool | None
    requires_piecewise: bool | None
    layouts: tuple[str | None, str | None]
    other_methods: Sequence[str] = ()
    """Public methods that are no hooks of vLLM."""


@dataclass(slots=True)
class ConnectorResult:
    """One configured connector; ``facts`` is None without vLLM, or if its class can't be used."""

    name: str
    kv_connector: str
    kv_role: str | None
    is_best_effort: bool
    facts: Facts | None = None
    hands_over: str = ""  # the class whose kind can take the KV, if it hands KV over to another engine


@dataclass(slots=True)
class CheckResult:
    """The result of a check. ``config`` has kvobs as its router; ``off`` maps each disabled feature to the reason."""

    router: Router
    by_variable: bool = False
    vllm: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may have secrets
    is_single: bool = False  # as given it has one connector without a router
    validated: validation.Validated | None = field(default=None, repr=False)
    options: Options = field(default_factory=Options)
    failure_policy: str = "fail"
    tracing: str = "off"
    metrics_go_to: str = ""
    spans_go_to: str = ""
    port: int | None = None  # the exporter's
    conditions: Conditions = SAFE
    of_blocks: Mapping[str, str] = field(default_factory=dict)  # the options by which its KV blocks differ from others'
    holes: tuple[str, ...] = ()  # the places of values that are not known: nothing is found there
    is_elsewhere: bool = False  # the engine runs in an image: what is missing here is not known
    connectors: list[ConnectorResult] = field(default_factory=list)
    off: dict[str, str] = field(default_factory=dict)
    mistakes: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    unknown: list[Finding] = field(default_factory=list)  # what may be right, and can't be checked as it is given

    def add(self, *findings: Finding) -> None:
        """Add findings, each once: a missing library is reported, not the import error that it causes."""
        refused = {finding.path for finding in self.mistakes if finding.path.endswith("kv_connector")}
        for finding in findings:
            located, elsewhere = self._locate(finding), finding.kind.elsewhere if self.is_elsewhere else None
            if elsewhere is Level.UNKNOWN:
                located = replace(located, allowed="", fix=f"check in the image, or here: {finding.fix}")
            its = self.of(level := elsewhere or finding.kind.level)
            noted = {Level.MISTAKE: refused, Level.UNKNOWN: {each.path for each in its}}.get(level, ())
            if not (self._is_hole(located.path) or located.path in noted or located in its):
                its.append(located)

    def of(self, level: Level) -> list[Finding]:
        """Return the findings of a level."""
        return {Level.MISTAKE: self.mistakes, Level.WARNING: self.warnings, Level.UNKNOWN: self.unknown}[level]

    def _locate(self, finding: Finding) -> Finding:
        """Return a finding with its path in the configuration as it is: a single connector is its top level."""
        inner = finding.path.removeprefix(validation.path_of(0))
        is_inner = self.is_single and inner != finding.path
        return replace(finding, path=inner.removeprefix(".") or "kv_connector") if is_inner else finding

    def _is_hole(self, path: str) -> bool:
        """Return whether a path is at a value that is not known."""
        return any(re.match(rf"{re.escape(hole)}(?![\w-])", path) for hole in self.holes)
