"""What the check says is what vLLM builds, and what it calls a mistake ends the start: on vLLM's real configuration."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from rich.console import Console
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.v1.engine.output_processor import OutputProcessor

import kvobs
from kvobs.children import known
from kvobs.cli.check import port
from kvobs.cli.check.check import Checked, Flags, check
from kvobs.cli.check.report import as_dict, lay_out_classes, lay_out_text, lines
from kvobs.cli.check.rewrite import Router
from kvobs.config import PATH, ConfigError, read
from kvobs.connector import get_kv_connector_cache_layout
from kvobs.findings import Finding
from kvobs.host import RUST_FRONTEND
from kvobs.options import Options
from kvobs.plugin import VARIABLE
from kvobs.testing import Script, ScriptedConnector, cache_config, engine_config
from kvobs.topology import Engine
from tests.support.contexts import no_otel_variables
from tests.support.rig import child_config

TWO = [{"kv_connector": name, "kv_role": "kv_both"} for name in ("DecodeBenchConnector", "ExampleConnector")]
NOT_A_CLASS = len


class LayerwiseConnector(ScriptedConnector):
    """Has hooks of each layer, and so on: what scripted ones have not."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("layerwise"))

    @property
    def requires_kv_delivery(self) -> bool:
        return self._kv_transfer_config.is_kv_consumer

    def get_handshake_metadata(self) -> None:
        self._note("get_handshake_metadata")


class BrokenConnector(KVConnectorBase_V1):
    """Can't say whether it needs piecewise graphs."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        raise LookupError("no such thing")


def config_of(connectors: Any = TWO, kvobs: Any = None, **more: Any) -> dict[str, Any]:
    extra = {"connectors": connectors} | ({} if kvobs is None else {"kvobs": kvobs})
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvobs",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **more,
    }


def start(config: Mapping[str, Any]) -> list[Any]:
    """Build what vLLM builds of a configuration, in its order; return both sides."""
    transfer = KVTransferConfig(**copy.deepcopy(dict(config)))
    cls = KVConnectorFactory.get_connector_class(transfer)
    vllm = engine_config(transfer)
    vllm.scheduler_config.disable_hybrid_kv_cache_manager = not KVConnectorFactory.supports_hma_config(transfer)
    get_kv_connector_cache_layout(vllm)
    return [cls(vllm, role, cache_config()) for role in KVConnectorRole]


def starts(config: Mapping[str, Any]) -> bool:
    try:
        start(config)
    except Exception:
        return False
    return True


HERE = __name__


def scripted(cls: str = "ScriptedConnector", **more: Any) -> dict[str, Any]:
    module = (
        "tests.unit.cli.check.test_check"
        if cls in ("LayerwiseConnector", "BrokenConnector")
        else "tests.support.scripted"
    )
    return child_config(Script(cls), cls, **{"kv_connector_module_path": module, **more})


def paths(checked: Checked) -> list[str]:
    return [finding.path.removeprefix(f"{PATH}.") for finding in checked.mistakes]


# --- what is built is what was said


def layerwise(role: str, **more: Any) -> dict[str, Any]:
    return scripted("LayerwiseConnector", kv_role=role, **more)


def isolated() -> dict[str, Any]:
    """Return a configuration with a best-effort child."""
    children = [scripted(), layerwise("kv_both")]
    return config_of(children, {"isolate": ["LayerwiseConnector"]}, kv_load_failure_policy="recompute")


GOOD: dict[str, Callable[[], dict[str, Any]]] = {
    "scripted": lambda: config_of([scripted()]),
    "many": lambda: config_of([scripted(), scripted("HndConnector"), layerwise("kv_both"), scripted()]),
    "layerwise": lambda: config_of([
        layerwise("kv_consumer", kv_connector_extra_config={"tag": "LayerwiseConnector", "layerwise": True}),
        layerwise("kv_producer"),
    ]),
    "vLLM's own": lambda: config_of(TWO, {"names": ["bench"]}),
    "isolated": isolated,
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_what_is_built_is_what_the_check_says(kind: str) -> None:
    config = GOOD[kind]()
    checked = check(config)
    assert checked.mistakes == []
    scheduler, worker = start(config)
    said = checked.children
    assert [child.name for child in said] == [child.name for child in worker._children]
    assert [child.is_isolated for child in said] == [child.gate is not None for child in worker._children]
    assert [child.kv_role for child in said] == [c._kv_transfer_config.kv_role for c in worker._connectors]
    for child, built, other in zip(said, worker._children, scheduler._children, strict=True):
        facts, real = child.facts, built.connector
        assert facts is not None
        assert facts.class_path == f"{type(real).__module__}.{type(real).__qualname__}"
        assert facts.supports_hma == supports_hma(real)
        assert facts.must_deliver == real.requires_kv_delivery
        for one in (built, other):
            assert [one.does(hook) for hook in facts.busy_hooks] == [True] * len(facts.busy_hooks)
            assert [one.does(hook) for hook in facts.empty_hooks] == [False] * len(facts.empty_hooks)
    assert ("hybrid KV cache manager" not in checked.off) == worker._all_support_hma
    assert bool(checked.saying("must_deliver", True)) == worker.requires_kv_delivery
    is_piecewise = bool(checked.saying("requires_piecewise", True))
    assert is_piecewise == kvobs.MultiConnector.requires_piecewise_for_cudagraph(config[PATH])
    layouts: set[str | None] = {*checked.layouts(is_mla=False).values()}
    assert (layouts or {None}) == {get_kv_connector_cache_layout(engine_config(KVTransferConfig(**config)))}


def test_best_effort_children_start_where_there_are_full_cuda_graphs() -> None:
    """There vLLM asks this before it builds anything, and hands over ``kv_connector_extra_config`` alone."""
    config = isolated()
    assert check(config).mistakes == []
    assert kvobs.MultiConnector.requires_piecewise_for_cudagraph(config[PATH]) is False


@pytest.mark.parametrize("name", ["OffloadingConnector", "NixlConnector", "SimpleCPUOffloadConnector"])
def test_classes_of_vllm_say_in_advance_what_they_say_of_this_model(name: str) -> None:
    """Those that need memory or a network to be built, too."""
    own = {"cpu_bytes_to_use": 1 << 30} if "Offload" in name else {}
    transfer = KVTransferConfig(**config_of([{"kv_connector": name, "kv_role": "kv_both", PATH: own}]))
    (child,) = check(vars(transfer)).children
    assert child.facts is not None
    assert child.facts.layouts[False] == get_kv_connector_cache_layout(engine_config(transfer))
    assert child.facts.must_deliver == (name == "NixlConnector")
    assert child.facts.has_handshake == (name == "NixlConnector")
    assert child.facts.supports_hma


def test_the_library_behind_a_class_of_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of([{"kv_connector": "NixlConnector", "kv_role": "kv_both"}])
    facts = check(config).children[0].facts
    assert facts is not None
    assert facts.library == f"nixl {version('nixl')}"
    monkeypatch.setattr(known, "is_installed", lambda module: False)
    (mistake,) = check(config).mistakes
    assert mistake.says == "found 'NixlConnector', which needs 'nixl', which is not installed here"
    assert mistake.fix == "install it: pip install nixl"


# --- a mistake ends the start, and nothing else does

BAD: dict[str, tuple[Any, list[str]]] = {
    "no role": (config_of([{"kv_connector": "ExampleConnector"}]), ["connectors[0].kv_role"]),
    "wrong role": (config_of([{**TWO[0], "kv_role": "both"}]), ["connectors[0].kv_role"]),
    "no role on top": ({**config_of(), "kv_role": None}, ["kv_role"]),
    "misspelt key": (config_of([{**TWO[0], "kv_rol": 1}]), ["connectors[0].kv_rol"]),
    "misspelt key on top": (config_of(connectors=TWO, kv_load_policy="first"), ["kv_load_policy"]),
    "wrong port": (config_of([TWO[0], {**TWO[1], "kv_port": "high"}]), ["connectors[1].kv_port"]),
    "unknown class": (config_of([{**TWO[0], "kv_connector": "NixlConector"}]), ["connectors[0].kv_connector"]),
    "no module": (config_of([{**TWO[0], "kv_connector_module_path": "no.such"}]), ["connectors[0].kv_connector"]),
    "empty module": (config_of([{**TWO[0], "kv_connector_module_path": ""}]), ["connectors[0].kv_connector"]),
    "no class": (config_of([{**TWO[0], "kv_connector_module_path": "json"}]), ["connectors[0].kv_connector"]),
    "a function": (
        config_of([{**TWO[0], "kv_connector": "NOT_A_CLASS", "kv_connector_module_path": HERE}]),
        ["connectors[0].kv_connector"],
    ),
    "another class": (
        config_of([{**TWO[0], "kv_connector": "Script", "kv_connector_module_path": "kvobs.testing"}]),
        ["connectors[0].kv_connector"],
    ),
    "broken class": (
        config_of(
            [
                {
                    **TWO[0],
                    "kv_connector": "BrokenConnector",
                    "kv_connector_module_path": HERE,
                }
            ]
        ),
        ["connectors[0].kv_connector"],
    ),
    "no library": (config_of([{**TWO[0], "kv_connector": "LMCacheConnectorV1"}]), ["connectors[0].kv_connector"]),
    "no library for a worker": (
        config_of([{**TWO[0], "kv_connector": "MooncakeConnector"}]),
        ["connectors[0].kv_connector"],
    ),
    "no connectors": (config_of([]), ["connectors"]),
    "no extra": ({key: value for key, value in config_of().items() if key != PATH}, ["connectors"]),
    "extra is a list": (config_of() | {PATH: []}, [PATH]),
    "connector is text": (config_of(["ExampleConnector", TWO[0]]), ["connectors[0]"]),
    "isolated, policy fail": (
        config_of([scripted()], {"isolate": ["ScriptedConnector"]}),
        ["kv_load_failure_policy"],
    ),
    "isolated, hands KV over": (
        config_of(
            [scripted(), {"kv_connector": "NixlConnector", "kv_role": "kv_both"}],
            {"isolate": ["NixlConnector"]},
            kv_load_failure_policy="recompute",
        ),
        ["kvobs.isolate"],
    ),
    "isolated, producer": (
        config_of([layerwise("kv_producer")], {"isolate": ["LayerwiseConnector"]}, kv_load_failure_policy="recompute"),
        ["kvobs.isolate"],
    ),
    "kvobs within kvobs": (
        config_of(
            [
                scripted(),
                {
                    "kv_connector": "MultiConnector",
                    "kv_connector_module_path": "kvobs",
                    "kv_role": "kv_both",
                    PATH: {"connectors": [scripted()]},
                },
            ]
        ),
        ["connectors[1].kv_connector"],
    ),
    "isolated, unknown": (
        config_of(kvobs={"isolate": ["nixl"]}, kv_load_failure_policy="recompute"),
        ["kvobs.isolate[0]"],
    ),
    "kvobs under another name": (config_of() | {"kv_connector": "Multi"}, ["kv_connector"]),
    "policy": (config_of(kv_load_failure_policy="recomputed"), ["kv_load_failure_policy"]),
    "no name at all": ({"kv_role": "kv_both"}, ["kv_connector"]),
    "single, wrong role": ({"kv_connector": "ExampleConnector", "kv_role": "both"}, ["kv_role"]),
    "single, no role": ({"kv_connector": "ExampleConnector"}, ["kv_role"]),
}


@pytest.mark.filterwarnings("ignore:.*MooncakeConnectorWorker.__del__")  # that of one that was not built to its end
@pytest.mark.parametrize("kind", BAD)
def test_a_mistake_is_found_where_it_is_and_ends_the_start(kind: str) -> None:
    config, where = BAD[kind]
    Script("ScriptedConnector")
    checked = check(config)
    assert paths(checked) == where
    assert all(finding.says and finding.fix for finding in checked.mistakes)
    with pytest.raises(Exception):  # noqa: B017, PT011 whatever vLLM raises
        start(config)


def test_layouts_that_differ_are_a_mistake() -> None:
    config = config_of([scripted("HndConnector"), scripted("NhdConnector")])
    checked = check(config)
    assert paths(checked) == ["connectors"]
    assert "HndConnector needs HND, NhdConnector needs NHD" in checked.mistakes[0].says
    assert not starts(config)


def test_all_mistakes_are_found_in_one_run() -> None:
    """Of the top level, the options, and each child, whose class is looked at though its role is wrong."""
    bad = [{"kv_connector": "NixlConector", "kv_role": "both"}, {**TWO[1], "x": 1}, 7]
    checked = check(config_of(bad, {"load_policy": "best", "nmaes": []}, kv_prot=1), Flags(True, "http://x"))
    assert paths(checked) == [
        "kv_prot",
        "connectors[2]",
        "kvobs.load_policy",
        "kvobs.nmaes",
        "connectors[0].kv_role",
        "connectors[0].kv_connector",
        "connectors[1].x",
        "--disable-log-stats, --otlp-traces-endpoint",
    ]
    fixes = [finding.fix for finding in checked.mistakes]
    assert (fixes[0], fixes[3], fixes[5]) == ("use 'kv_port'", "use 'names'", "use 'NixlConnector'")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(["first", "longest", "calls", "ExampleConnector", "kvobs", "vllm", "recompute"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["level", "dir", "x"]), inner),
    max_leaves=3,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from([*Options.model_fields, "nmaes", "a: b"]), VALUES, max_size=4))
def test_every_option_that_is_refused_is_reported_and_no_other(options: dict[str, Any]) -> None:
    """The two children may be isolated, or reset: nothing is wrong with them but what the options say."""
    refused: tuple[Finding, ...] = ()
    try:
        read({"connectors": TWO, "kvobs": options})
    except ConfigError as error:
        refused = error.mistakes
    checked = check(config_of(kvobs=options, kv_load_failure_policy="recompute"))
    assert checked.mistakes == list(refused)


@given(st.data())
def test_the_check_finds_a_mistake_exactly_where_the_start_fails(data: st.DataObject) -> None:
    """Over configurations with some key or other changed, at the top level, in a child, or in the options."""
    config = copy.deepcopy(config_of(kvobs={"names": ["a", "b"]}, kv_load_failure_policy="recompute"))
    extra = config[PATH]
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.sampled_from([config, *extra["connectors"], extra["kvobs"]]))
        keys = [
            "kv_role",
            "kv_port",
            "kv_buffer_device",
            "engine_id",
            "kv_load_failure_policy",
            "isolate",
            "names",
            "x",
        ]
        place[data.draw(st.sampled_from(keys))] = data.draw(
            VALUES | st.sampled_from(["kv_both", "kv_consumer", ["b"], ["a", "b"], "1", "fail"])
        )
    assert (check(config).mistakes == []) == starts(config)


KEYS = st.sampled_from(["kv_connector", "kv_connector_module_path", "kv_role", "names", "isolate", "tracing", "x"])
SOME_CLASS = st.sampled_from(["NixlConnector", "x", 1])
ENTRY = st.fixed_dictionaries({}, optional={"kv_connector": SOME_CLASS, "kv_role": st.just("kv_both") | st.integers()})
ANYTHING = st.one_of(
    st.sampled_from([None, True, 1, 0.5, "", "x", "kvobs", "kv_both", [], {}, [1], {"x": 1}]),
    st.fixed_dictionaries({}, optional={"connectors": st.integers() | st.lists(ENTRY | st.integers(), max_size=2)}),
    st.fixed_dictionaries({
        "connectors": st.lists(ENTRY, max_size=2), "kvobs": st.integers() | st.dictionaries(KEYS, VALUES, max_size=2)
    }),
)  # fmt: skip
CONNECTORS = ["MultiConnector", "ExampleConnector", None, 1]


@given(st.dictionaries(KEYS | st.just(PATH), ANYTHING, max_size=4), st.sampled_from(CONNECTORS))
def test_whatever_is_given_it_has_an_answer(config: dict[str, Any], connector: Any) -> None:
    """And that can be printed, and sent as JSON."""
    checked = check({**config, "kv_connector": connector})
    json.dumps(as_dict(checked))
    parts = [lay_out_text(checked), lay_out_classes(checked), *lines(checked.warnings, checked.mistakes)]
    Console(file=io.StringIO()).print(*parts)
    assert checked.mistakes or starts({**config, "kv_connector": connector})


# --- what does not end the start, and is worth a word


def test_a_policy_of_a_child_is_ignored() -> None:
    config = config_of([TWO[0], {**TWO[1], "kv_load_failure_policy": "recompute"}])
    (warning,) = check(config).warnings
    assert warning.path == f"{PATH}.connectors[1].kv_load_failure_policy"
    assert "no effect here: vLLM reads the top level only, where it is 'fail'" in warning.says
    assert starts(config)
    assert check(config_of([{**TWO[1], "kv_load_failure_policy": "fail"}])).warnings == []


@pytest.mark.parametrize(
    ("config", "router", "path"),
    [
        (config_of(kv_connector_module_path=None), Router.STOCK, "kv_connector_module_path"),
        (dict(TWO[0]), Router.NONE, "kv_connector"),
        (config_of(), Router.KVOBS, None),
    ],
)
@pytest.mark.parametrize("variable", ["1", None])
def test_it_says_whether_kvobs_takes_part(
    config: dict[str, Any], router: Router, path: str, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variable, a plain MultiConnector is kvobs's."""
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))  # plugins may be loaded
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    else:
        monkeypatch.delenv(VARIABLE, raising=False)
    checked = check(config)
    by_variable = variable == "1" and router is Router.STOCK
    assert checked.by_variable is by_variable
    assert checked.router is (Router.KVOBS if by_variable else router)
    assert [warning.path for warning in checked.warnings] == ([] if by_variable or path is None else [path])
    assert checked.mistakes == []
    assert all(child.facts for child in checked.children)


def test_without_stats_kvobs_is_blind_and_with_traces_too_vllm_fails() -> None:
    alone = check(config_of(), Flags(disable_log_stats=True))
    assert ([w.path for w in alone.warnings], alone.mistakes) == (["--disable-log-stats"], [])
    assert alone.off["metrics"] == "--disable-log-stats"
    both = Flags(disable_log_stats=True, otlp_traces_endpoint="http://collector")
    for config in (config_of(), config_of(kvobs={"exporter": {}})):
        mistakes = check(config, both).mistakes
        assert [m.path for m in mistakes] == ["--disable-log-stats, --otlp-traces-endpoint"]


def test_with_the_exporter_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setenv(RUST_FRONTEND, "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://collector:4317")
    monkeypatch.setattr(port, "findings", lambda *_: [])  # whatever listens on this machine
    flags = Flags(disable_log_stats=True, api_server_count=2)
    checked = check(config_of(kvobs={"exporter": {}}), flags)
    assert (checked.warnings, checked.mistakes) == ([], [])
    assert not {"metrics", "tracing", "exemplars"} & checked.off.keys()
    assert checked.metrics_go_to == "http://127.0.0.1:9464/metrics, from kvobs's exporter"
    assert checked.spans_go_to == "http://collector:4317, from kvobs's exporter"


def test_the_rust_front_end_shows_nothing_of_kvobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUST_FRONTEND, "1")
    checked = check(config_of())
    variable = f"environment variable {RUST_FRONTEND}"
    assert [w.path for w in checked.warnings] == [variable]
    assert checked.off["metrics"] == checked.off["tracing"] == variable
    assert checked.metrics_go_to == f"nowhere: {variable}"


def test_vllm_does_fail_with_traces_and_no_stats() -> None:
    """Of a request that was registered without stats, when it is finished."""
    untold: Any = SimpleNamespace(stats=None)
    with pytest.raises(AssertionError):
        OutputProcessor.do_tracing(untold, untold, untold, None)


@pytest.mark.parametrize("level", [None, "off", "requests", "calls"])
@pytest.mark.parametrize("endpoint", [None, "http://collector"])
def test_it_says_how_far_tracing_goes(level: str | None, endpoint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    options = {"tracing": {"level": level}} if level else None
    checked = check(config_of(kvobs=options), Flags(otlp_traces_endpoint=endpoint))
    wanted = level or "requests"
    assert checked.tracing == (wanted if endpoint else "off")
    assert ("tracing" in checked.off) == (checked.tracing == "off")
    wants_it_in_vain = level in ("requests", "calls") and endpoint is None
    assert [w.path for w in checked.warnings] == ([f"{PATH}.kvobs.tracing.level"] if wants_it_in_vain else [])


def test_the_environment_can_turn_tracing_on_without_parents_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector")
    checked = check(config_of())
    assert checked.tracing == "requests"
    assert "joining clients' traces" in checked.off
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert check(config_of()).off["tracing"] == "OTEL_SDK_DISABLED is true here"


def test_several_api_servers_have_no_exemplars(monkeypatch: pytest.MonkeyPatch) -> None:
    no_otel_variables(monkeypatch)
    checked = check(config_of(), Flags(api_server_count=2, otlp_traces_endpoint="http://collector"))
    assert checked.off["exemplars"] == "--api-server-count"
    assert [w.path for w in checked.warnings] == ["--api-server-count"]
    without_traces = check(config_of(), Flags(api_server_count=2))
    assert (without_traces.off["exemplars"], without_traces.warnings) == ("tracing is off", [])


def test_it_says_who_keeps_the_hybrid_manager_off() -> None:
    assert check(config_of()).off["hybrid KV cache manager"] == "not supported by ExampleConnector"


@pytest.mark.parametrize(
    ("what", "on"),
    [
        ("isolation", {"isolate": ["ExampleConnector"]}),
        ("timeline", {"timeline": {"dir": "/tmp/t"}}),
        ("request reports", {"report": True}),
        ("request reports", {"request_log": "stderr"}),
        ("lookup timeout", {"lookup_timeout_ms": 5.0}),
    ],
)
def test_what_an_option_would_switch_on_is_off_without_it(what: str, on: dict[str, Any]) -> None:
    assert check(config_of()).off[what].startswith(("kvobs.", "neither kvobs."))
    assert what not in check(config_of(kvobs=on, kv_load_failure_policy="recompute")).off


@pytest.mark.parametrize(("role", "reads"), [("kv_producer", (2, 4)), ("kv_consumer", (4, 2)), ("kv_both", (4, 2))])
def test_a_producer_is_read_from_and_any_other_reads(role: str, reads: tuple[int, int]) -> None:
    own, other = Engine(2, 16), Engine(4, 16)
    engines = check(config_of(kv_role=role), Flags(kv_heads=8, engines=(own, other))).engines
    assert engines is not None
    assert (engines.prefill.tp_size, engines.decode.tp_size) == reads


def test_engines_that_do_not_fit_are_a_mistake() -> None:
    checked = check(config_of(), Flags(kv_heads=8, engines=(Engine(2, 16), Engine(3, 16))))
    assert [m.path for m in checked.mistakes] == ["--tensor-parallel-size, --remote-tensor-parallel-size"]
    assert checked.engines is None


def test_nothing_of_what_may_be_a_secret_is_printed() -> None:
    secret = "hunter2"
    bad = config_of([{**TWO[0], "kv_port": secret, "password": secret, PATH: secret}], engine_id=[secret])
    checked = check(bad)
    assert len(checked.mistakes) == 4
    assert secret not in repr(checked)


@pytest.mark.parametrize(
    ("endpoint", "is_one"),
    [
        ("http://collector:4317", True),
        ("collector:4317", True),
        ("grpc://collector", True),
        ("dns:collector:4317", True),
        ("[::1]:4317", True),
        ("nonsense", False),
        ("", False),
        ("http://", False),
    ],
)
def test_an_endpoint_without_scheme_and_port_is_a_slip(endpoint: str, is_one: bool) -> None:
    noted = [w.path for w in check(config_of(), Flags(otlp_traces_endpoint=endpoint), ask=None).warnings]
    assert noted == ([] if is_one else ["--otlp-traces-endpoint"])
