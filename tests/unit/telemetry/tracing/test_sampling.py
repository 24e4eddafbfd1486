"""What is traced follows from configuration and environment alone; a trace gets one verdict, the sampler's."""

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from opentelemetry import trace
from opentelemetry.context import attach, detach

from kvobs.schema.options import Options
from kvobs.telemetry.tracing.sampling import ENDPOINT, TRACES_ENDPOINT, TracingSettings, Verdicts, warn_about
from kvobs.telemetry.tracing.trace_context import DISABLED, TraceContext, as_otel
from tests.support.contexts import SAMPLED, UNSAMPLED, no_otel_variables

URL = "http://collector:4317"


def config_of(endpoint: str | None) -> Any:
    return SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=endpoint))


def options(**more: Any) -> Options:
    return Options.model_validate(more)


@pytest.mark.parametrize("level", [None, "off", "requests", "calls"])
@pytest.mark.parametrize("endpoint", [None, URL])
@pytest.mark.parametrize("variable", [None, TRACES_ENDPOINT, ENDPOINT])
@pytest.mark.parametrize("disabled", [None, "false", "true", " TRUE "])
def test_level_and_endpoint_decide_the_tracing(
    *,
    level: str | None,
    endpoint: str | None,
    variable: str | None,
    disabled: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    no_otel_variables(monkeypatch, **{name: URL for name in [variable] if name})
    if disabled is not None:
        monkeypatch.setenv(DISABLED, disabled)
    mine = options(tracing={"level": level})
    tracing = TracingSettings.of(mine, config_of(endpoint))
    is_traced = bool(endpoint or variable) and level != "off" and disabled in (None, "false")
    assert (tracing.is_on, tracing.has_calls) == (is_traced, is_traced and level == "calls")
    assert tracing.endpoint == endpoint
    for _ in range(2):
        warn_about(mine, tracing)
    logged = [record.getMessage() for record in caplog.records]
    if is_traced and endpoint is None:
        (message,) = logged
        begin = f"spans are sent to the endpoint in {variable}, but without --otlp-traces-endpoint vLLM drops"
        assert message.startswith(begin)
    elif not is_traced and level in ("requests", "calls"):
        (message,) = logged
        begin = f"kv_connector_extra_config.kvobs.tracing.level: found {level!r}, but nothing is traced"
        assert message.startswith(begin)
    else:
        assert logged == []


@pytest.mark.parametrize("config", [None, SimpleNamespace(), SimpleNamespace(observability_config=None)], ids=str)
def test_a_configuration_without_the_field_names_no_endpoint(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    tracing = TracingSettings.of(options(), config)
    assert (tracing.is_on, tracing.endpoint) == (False, None)


@pytest.mark.parametrize(
    ("given", "slow_ms", "slow_sync_ms"),
    [
        ({}, 1000, 100),
        ({"slow_load_ms": 50}, 50, 50),
        ({"slow_load_ms": 50.5, "slow_call_ms": 20}, 50.5, 20),
        ({"slow_call_ms": 5000}, 1000, 1000),
    ],
    ids=str,
)
@pytest.mark.parametrize("endpoint", [None, URL])
def test_a_step_waits_for_a_sync_load_as_for_a_call(
    given: dict[str, Any], slow_ms: float, slow_sync_ms: float, endpoint: str | None
) -> None:
    """Also where nothing is traced: slow loads are written all the same."""
    tracing = TracingSettings.of(options(**given), config_of(endpoint))
    assert (tracing.slow_load_ns, tracing.slow_sync_load_ns) == (slow_ms * 1e6, slow_sync_ms * 1e6)


CALLERS = {"none": None, "sampled": SAMPLED, "unsampled": UNSAMPLED}
# sampler -> the callers whose traces are exported
EXPORTED = {
    "": ("none", "sampled"),
    "parentbased_always_on": ("none", "sampled"),
    "parentbased_always_off": ("sampled",),
    "always_on": tuple(CALLERS),
    "always_off": (),
    "nonsense": ("none", "sampled"),
}


@pytest.mark.parametrize("sampler", EXPORTED)
@pytest.mark.parametrize("caller", CALLERS)
def test_the_verdict_is_the_configured_samplers(sampler: str, caller: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch, **({"OTEL_TRACES_SAMPLER": sampler} if sampler else {}))
    assert Verdicts().on("1" * 32, CALLERS[caller]) is (caller in EXPORTED[sampler])


@given(st.integers(1, 2**128 - 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from([None, SAMPLED, UNSAMPLED]))
def test_a_ratio_gives_a_trace_one_verdict_everywhere(number: int, ratio: float, caller: TraceContext | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, depends in (("traceidratio", True), ("parentbased_traceidratio", caller is None)):
            no_otel_variables(patch, OTEL_TRACES_SAMPLER=name, OTEL_TRACES_SAMPLER_ARG=str(ratio))
            verdicts = {Verdicts().on(f"{number:032x}", caller) for _ in range(2)}
            assert verdicts == {number % 2**64 < round(ratio * 2**64) if depends else caller is SAMPLED}


@pytest.mark.parametrize("around", [SAMPLED, UNSAMPLED])
@pytest.mark.parametrize("sampler", ["parentbased_always_on", "parentbased_always_off"])
def test_a_current_span_is_nobodys_parent(sampler: str, around: TraceContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where vLLM runs inside of a program that traces itself, or a connector calls back with its own context."""
    no_otel_variables(monkeypatch, OTEL_TRACES_SAMPLER=sampler)
    verdicts = Verdicts()
    token = attach(as_otel(around))
    try:
        assert trace.get_current_span().get_span_context().is_valid
        assert verdicts.on("1" * 32, None) is (sampler == "parentbased_always_on")
        assert verdicts.on("1" * 32, SAMPLED) is True
        assert verdicts.on("1" * 32, UNSAMPLED) is False
    finally:
        detach(token)
