"""Nothing is unpickled, imported or run at a peer's word; what clients send is bounded; nothing secret gets out."""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import yaml
from opentelemetry import trace as otel

import kvobs
import tests.support.scripted
from kvobs.cli.check.source import _Loader
from kvobs.schema.signals import OPEN, SIGNALS
from kvobs.schema.spans import ATTRIBUTES
from kvobs.telemetry.payload.stats import RawStats, _class_at, class_path, rebuild
from kvobs.telemetry.tracing import trace_context
from kvobs.telemetry.tracing.trace_context import TRACEPARENT, as_otel, into_params, of_headers, of_params, parse
from kvobs.testing import BLOCK, Rig, Script
from tests.support.contexts import SAMPLED, no_otel_variables
from tests.support.front import Front
from tests.support.rig import entry_for
from tests.support.scripted import MeteredConnector

PACKAGE = Path(kvobs.__file__).parent
SECRET = "s3cr3t-" + "0123456789" * 3

UNPICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "jsonpickle", "torch.load"}
RUNS = {"eval", "exec", "__import__", "import_module", "run_module", "run_path", "system", "popen"}
WRITES = {"write_text", "write_bytes", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryFile", "mkdir", "dump"}
TALKS = {"socket", "socketserver", "http", "urllib", "requests", "subprocess", "zmq"}


def in_production() -> Iterator[tuple[str, ast.AST]]:
    """Yield the file and each node of what a server or a command may import: all but the demo and what tests use."""
    for path in PACKAGE.rglob("*.py"):
        if not {"demo", "testing"} & set(path.relative_to(PACKAGE).parts):
            for node in ast.walk(ast.parse(path.read_text())):
                yield path.name, node


def imports(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {str(node.module).split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()


def called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Name):
        return function.id
    return function.attr if isinstance(function, ast.Attribute) else ""


def test_nothing_is_unpickled_and_only_opentelemetry_sends() -> None:
    found = [(name, imported) for name, node in in_production() for imported in imports(node)]
    assert len(found) > 100, "the test finds imports"
    talking = {name for name, imported in found if imported in TALKS}
    assert talking == {
        "web.py",  # the command kvobs top, which reads the /metrics that it is given, and completes their addresses
        "running.py",  # the same with --server and --prometheus, which reads what it is given
        "runs.py",  # kvobs summary -- COMMAND, which runs the command that it is given
        "hatch_build.py",  # compiles the probe when kvobs is built; it is in no wheel
        "starter.py",  # starts the exporter
        "http_server.py",  # the exporter, which serves /metrics where it is asked to
        "listening.py",  # the same
    }
    assert {one for one in found if one[1] in UNPICKLES} == {
        ("source.py", "yaml"),  # a configuration, for the command kvobs check; it makes no objects
        # Messages of an isolated connector between an engine's processes, which vLLM itself pickles as a whole.
        *(("metadata.py", "pickle"), ("answers.py", "pickle"), ("isolation.py", "pickle")),
    }
    calls = {ast.unparse(node) for _, node in in_production() if called(node)}
    assert "_Loader(text)" in calls
    assert not [call for call in calls if call.startswith("yaml.")]
    assert _Loader.__bases__ == (yaml.SafeLoader,)
    importers = {name for name, imported in found if imported == "importlib"}
    # Commands, which ask whether vLLM and a connector's library are there.
    assert importers == {"commands.py", "vllm_source.py", "known.py"}
    loads = {(name, ast.unparse(node)) for name, node in in_production() if called(node) == "loads"}
    assert loads == {
        ("launch.py", "json.loads(whole, object_pairs_hook=unique)"),  # the configuration, for the command kvobs check
        # Of the model whose path a launch command has, for the same.
        ("rules.py", "json.loads((Path(str(options['model'])) / 'config.json').read_text(encoding='utf-8'))"),
        ("launch.py", "json.loads(json.dumps(config, default=str))"),
        ("web.py", "json.loads(text)"),  # a Prometheus's answers, for kvobs check and summary --prometheus
        ("__main__.py", "json.loads(sys.argv[1])"),  # the exporter's options, of the engine that starts it
        ("dashboards.py", "json.loads(files.pop(SETTINGS))"),  # a file of this installation
        ("metadata.py", "pickle.loads(part.pickled)"),
    }


def test_nothing_is_run_but_a_command_of_kvobs() -> None:
    found = [(name, called(node)) for name, node in in_production()]
    assert [one for one in found if one[1] in RUNS] == [("commands.py", "import_module")]


def test_nothing_is_written_to_a_file_but_what_is_asked_for() -> None:
    found = [(name, node) for name, node in in_production() if called(node) in WRITES | {"open", "fdopen", "Whole"}]
    spans = {"self.open(request_id)", "self._traces.open(request_id)"}
    found = [one for one in found if ast.unparse(one[1]) not in spans]
    of_engine = {
        "process.py": 1,  # /dev/null in the place of the engine's stderr
        "web_config.py": 1,  # to read the exporter's certificates
        # The folder and files of the pages, also to read them, or to look whether one is still written; locks.
        "files.py": 7,
    }
    of_log = {"request_log.py": 3}  # the file of kvobs.request_log, or the engine's stderr
    of_commands = {
        "dashboards.py": 2,  # kvobs dashboards
        "commands.py": 1,  # opens /dev/null as stdout after a write to it has failed
        "chrome.py": 1,  # kvobs timeline --chrome, and kvobs trace
        "command.py": 2,  # kvobs check: /dev/null, for the output of vLLM's import; kvobs summary -o
    }
    assert Counter(name for name, _ in found) == of_engine | of_log | of_commands


class Trap:
    """Is no connector, and says when it is used."""

    used: ClassVar[list[str]] = []

    @classmethod
    def build_kv_connector_stats(cls, data: Any = None) -> Any:
        cls.used.append("called")

    def __init__(self) -> None:
        self.used.append("made")


class Looked:
    """Notices whoever looks into it."""

    def __getattr__(self, name: str) -> Any:
        Trap.used.append(name)
        raise AttributeError(name)


LOOKED = Looked()


def noted(path: Any) -> Any:
    return rebuild({"a": {"n": 1}, "kvobs": {"a": path}})["a"]


HERE = ("Trap", "LOOKED", "LOOKED.x", "Trap.build_kv_connector_stats", "KVConnectorBase_V1.__subclasses__", "sys")
ELSEWHERE = ("os:system", "builtins:exec", "sys:modules", "subprocess:Popen", "os:path.join", ":")


@pytest.mark.parametrize("path", [*(f"{__name__}:{name}" for name in HERE), *ELSEWHERE])
def test_class_path_of_no_connector_is_not_touched(path: str) -> None:
    Trap.used.clear()  # pytest looks into everything here
    assert isinstance(noted(path), RawStats)
    assert Trap.used == []


def test_a_payload_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "not_configured_here.py").write_text(f"open({str(ran)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    for path in ("not_configured_here:C", "not_configured_here.more:C", "antigravity:C"):
        assert isinstance(noted(path), RawStats)
    assert not ran.exists()
    assert not {"not_configured_here", "antigravity"} & set(sys.modules)


def test_the_configured_connectors_are_imported_before_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM always makes its Prometheus logger, and that the connectors' metrics; the log may come without one."""
    path = class_path(MeteredConnector)
    monkeypatch.setattr(
        tests.support, "scripted", tests.support.scripted
    )  # importing it again sets it, beside the entry there
    monkeypatch.delitem(sys.modules, "tests.support.scripted")
    assert _class_at(path) is None
    Front(entry_for(Script("a"), "MeteredConnector"))
    assert class_path(_class_at(path)) == path


@pytest.mark.parametrize("part", ["0", "00-", "-", "a" * 32 + "-", "00-" + "a" * 32 + "-" + "b" * 16 + "-01-"])
def test_overlong_context_is_not_even_matched(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def match(value: str) -> None:
        assert len(value) <= 512

    assert parse("01" + SAMPLED.traceparent[2:] + "-x") is not None
    monkeypatch.setattr(trace_context, "_PATTERN", SimpleNamespace(fullmatch=match))
    for size in (500, 513, 10**7):
        assert parse((part * size)[:size]) is None


class Counting(dict[str, Any]):
    asked = 0

    def __getitem__(self, key: str) -> Any:
        self.asked += 1
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked += 1
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("all of it is read")

    keys = values = items = __iter__  # type: ignore[assignment]


@pytest.mark.parametrize("junk", [0, 100_000])
def test_only_our_headers_and_params_are_looked_at(junk: int) -> None:
    more = {f"k{i}": SECRET for i in range(junk)}
    headers = Counting({**more, "traceparent": SAMPLED.traceparent})
    own = Counting({**more, "traceparent": SAMPLED.traceparent})
    params = Counting({**more, "kvobs": own})
    assert of_headers(headers) == of_params(params) == SAMPLED
    assert max(headers.asked, own.asked, params.asked) <= 3


def test_clients_context_is_handed_on_as_ids_and_flag_only() -> None:
    """No tracestate, no baggage: neither to a decode engine, nor to connectors, nor to the collector."""
    sent = {"traceparent": "01" + SAMPLED.traceparent[2:] + "-" + SECRET, "tracestate": SECRET, "baggage": SECRET}
    read = of_headers(sent)
    assert read == SAMPLED
    assert SECRET not in json.dumps(into_params({}, TRACEPARENT, read.traceparent))
    assert not otel.get_current_span(as_otel(SAMPLED)).get_span_context().trace_state
    assert len(as_otel(SAMPLED)) == 1


def test_no_signal_and_no_attribute_is_about_content() -> None:
    """A new label or attribute is looked at by someone before it is in here."""
    labels = {label for signal in SIGNALS for label, values in signal.labels.items() if values is OPEN}
    assert labels == {
        "class", "connector", "error_type", "failure_policy", "hook", "index", "load_policy", "outcome", "peer", "rank",
        "reason", "role", "version", "vllm_version", "native",
    }  # fmt: skip
    assert not {"prompt", "token_ids", "params", "headers", "message", "config"} & {
        part for attribute in ATTRIBUTES for part in attribute.split(".")
    }


def test_nothing_secret_leaves_an_engine(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in pages with all numbers and spans, not in stats, not in metrics, not in kvobs's lines of the log."""
    a, b = Script("a"), Script("b")
    connectors = [entry_for(s, "MeteredConnector") for s in (a, b)]
    for connector in connectors:
        connector["kv_connector_extra_config"]["access_key"] = SECRET
    options = {"names": ["one", "two"], "tracing": {"level": "calls"}, "slow_call_ms": 1e-6}
    with monkeypatch.context() as patch:
        no_otel_variables(patch, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
        rig = Rig("kvobs", a, b, ranks=2, kvobs=options, connectors=connectors)
    no_otel_variables(monkeypatch)
    a.offers |= {"async": (BLOCK, True), "failed": (2 * BLOCK, True), "sync": (BLOCK, False)}
    b.promises.add("saved")
    b.params["saved"] = {"remote_key": SECRET}
    headers = {"traceparent": SAMPLED.traceparent, "tracestate": SECRET, "baggage": SECRET, "authorization": SECRET}
    prompts = []
    for i, name in enumerate(("async", "failed", "sync", "saved", "plain")):
        sent = {**headers, "traceparent": SECRET} if i == 4 else headers
        request = rig.add(name, trace_headers=sent, secret=SECRET, kvobs={"traceparent": SECRET, SECRET: SECRET})
        prompts.append(list(request.prompt_token_ids))
    rig.run(2)
    for rank in range(2):
        a.say(rank, received="async nobody", failed="failed")
        b.say(rank, saved="saved")
    rig.run(6)
    pages = [router._telemetry._recorders.page for router in (rig.connector, *rig.workers)]
    text = "".join(page.process.to_json().decode() + bytes(page.words).decode("latin-1") for page in pages)
    assert all(part in text for part in ("kv.load", "kv.call", "async", '"one"'))
    front = Front(*connectors, names=["one", "two"], engine_id=rig.scheduler.vllm_config.kv_transfer_config.engine_id)
    metrics = repr([family.samples for family in front.registry.collect()])
    assert "kvobs_loads_total" in metrics
    said = "\n".join(line.getMessage() for line in caplog.records if line.name.startswith("vllm.kvobs"))
    assert "slow_call_ms" in said
    for out in (text, metrics, said, json.dumps(rig.stats)):
        assert "s3cr3t" not in out
        for prompt in prompts:
            assert json.dumps(prompt[:8])[1:-1] not in out
            assert msgspec.msgpack.encode(prompt[:8])[1:].decode("latin-1") not in out
    assert "s3cr3t" in repr(request.kv_transfer_params), "it was there"
