"""The outputs that pages show are printed by the code: headings, rows and words; numbers and widths may differ."""

import dataclasses
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.cli.summary.screen import Picture as SummaryPicture
from kvobs.cli.top.screen import Picture
from kvobs.demo import tree
from kvobs.export.summary import summarize
from kvobs.page import files, layout, writer
from kvobs.page.layout import SPAN_BYTES
from kvobs.schema import __version__, signals
from kvobs.telemetry.tracing.journal import PER_SECOND, RESERVED
from kvobs.testing.collector import ReceivedSpan
from tests.support.page_files import page_folder
from tests.support.pages import TEXTS, not_printed, paragraphs, sample
from tests.support.promtool import answers
from tests.support.slow_loads import SLOW
from tests.support.summaries import DEMO
from tests.support.top_engines import exporting
from tests.support.top_rows import SERVER
from tests.support.watched import begin, note
from tests.support.written import Pages


def printed(part: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(part)
    return [line.rstrip() for line in capture.get().splitlines()]


def kvobs(*arguments: object) -> list[str]:
    """Return the output of the command in a terminal of 80 columns."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80"}).output.splitlines()


def test_a_line_that_is_not_printed_is_named() -> None:
    lines = ["connector  asked  hits", "cpu  97  8", "a ... c"]
    assert not_printed(lines, ["connector  lookups  hits", "cpu 96 8", "a b c"]) == lines[:1]


def numbers(line: str) -> list[int]:
    return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)]


def test_the_demos_table_is_what_it_prints() -> None:
    shown = sample("docs/quickstart.md", "What each connector did")
    made = dataclasses.replace(DEMO, server="What each connector did", seconds=None)
    assert shown[:1] == printed(SummaryPicture([made]))[:1]
    assert [line for line in printed(SummaryPicture([made])) if line in shown] == shown
    (comment,) = (part for part in paragraphs(TEXTS["docs/quickstart.md"]) if part.startswith("`disk` had"))
    assert set(numbers(comment)) <= set(numbers(" ".join(shown)))


def test_a_summary_and_its_comparison_are_as_the_command_prints() -> None:
    assert sample("docs/summary.md", "tiny at port") == printed(SummaryPicture([DEMO]))
    (cpu, disk), lines = DEMO.connectors, sample("docs/summary.md", "before")
    faster = dataclasses.replace(cpu, lookups=192, hit_share=0.5, load_p99_s=0.082), disk
    now = dataclasses.replace(DEMO, connectors=faster)
    assert not_printed(lines, printed(SummaryPicture([now], [DEMO]))) == []


def span(name: str, number: int, begin_ms: float, ms: float, parent: int = 0, **attributes: object) -> ReceivedSpan:
    named = {f"kv_transfer.{key.replace('__', '.')}": value for key, value in attributes.items()}
    begin = round(begin_ms * 1e6)
    return ReceivedSpan(name, "1f91", str(number), str(parent), begin, begin + round(ms * 1e6), {**REQUEST, **named})


REQUEST = {"gen_ai.request.id": "cmpl-8f56e1363ce8d56a-0"}
SLOW_LOAD = [
    span("llm_request", 1, 0, 1267.76),
    span("kv.lookup", 2, 1.39, 0.12, connector="remote", offered_tokens__remote=160, offered_tokens__cpu=0,
         tokens=160, outcome="hit"),
    span("kv.load remote", 3, 1.68, 872.58, connector="remote", tokens=160, bytes=655_360, mode="async", outcome="ok",
         slowest_rank=1, rank_skew=0.8408, sampling__reason="slow"),
    span("kv.load.rank", 4, 2.36, 31.07, parent=3, connector="remote", rank=0),
    span("kv.load.rank", 5, 2.97, 871.29, parent=3, connector="remote", rank=1),
]  # fmt: skip


def test_a_trace_is_what_the_demo_prints() -> None:
    _, *shown = sample("README.md", "trace 1f91")  # ids are any
    assert not_printed(shown, printed(tree.tree(SLOW_LOAD), width=max(map(len, shown)))) == []


CHECKED = """{"kv_connector": "MultiConnector", "kv_connector_module_path": "kvobs", "kv_role": "kv_both",
  "kv_connector_extra_config": {"connectors": [
    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
     "kv_connector_extra_config": {"cpu_bytes_to_use": 1073741824}},
    {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}],
    "kvobs": {"nmaes": ["cpu", "nixl"]}}}"""
INSTALLED = ("package", "library")  # differ from one machine to the next


def test_the_check_of_a_configuration_is_what_it_prints() -> None:
    lines = [line for line in sample("docs/check.md", f"kvobs {__version__} routes") if line.strip() != "..."]
    shown = [f"{line.split()[0]} ..." if line.startswith(INSTALLED) else line for line in lines]
    more = [line for line in sample("docs/check.md", "OffloadingConnector   NixlConnector") if line.strip() != "..."]
    assert (len(shown), len(more)) == (5, 10)
    result = CliRunner().invoke(app, ["check", CHECKED, "-v"], env={"COLUMNS": "100"})
    assert not_printed([*shown, *more], result.stdout.splitlines()) == []


def test_the_look_at_a_server_is_what_it_prints() -> None:
    command, *shown = sample("docs/quickstart.md", "$ kvobs check --server")
    with exporting(lambda _: None, {}, [], ("cpu", "nixl")) as address:
        printed = kvobs("check", "--server", address)
    assert [line.replace(address, command.split()[-1]) for line in printed] == shown


def test_the_screen_of_top_is_what_it_prints() -> None:
    shown = sample("docs/on-call.md", "kvobs top   the last")
    assert [line for line in printed(Picture([SERVER], 5)) if line] == shown
    assert not_printed(sample("README.md", "tokens   load"), shown) == []


def test_a_slow_load_is_what_the_command_prints() -> None:
    (_, *shown) = sample("docs/trace.md", "$ kvobs trace")
    with page_folder():
        pages = Pages(None, port=8000)
        pages.write(SLOW)
        lines = kvobs("trace")
    assert [line for line in shown if line.strip() != "..." and "engine " not in line and "load of" not in line] == [
        line.rstrip() for line in lines[1:2] + lines[3 : len(shown) - 1]
    ]
    assert lines[0].startswith(shown[0].partition("18:")[0])
    assert not_printed(["engine tiny, port 8000 (...)"], lines) == []


NS = {"ms": 10**6, "us": 10**3}


def test_a_timeline_is_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "folder", lambda: tmp_path / "pages")
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    shown, names, now = sample("docs/on-call.md", "rank 1, pid"), ["cpu", "steered"], time.perf_counter_ns()
    rows = [line.split() for line in shown if line.startswith(("  cpu ", "  steered "))]
    others = [
        ["cpu", hook, "1", "1", "us", "1", "us", "0"]
        for hook in ("get_finished", "take_events", "shutdown", "reset_cache")
    ]
    pid = os.fork()
    if not pid:  # a process that dies in a call
        box = begin("e", 1, names)
        for connector, hook, calls, total, unit, slowest, unit_of_slowest, _ in [*rows, *others]:
            most, n = float(slowest) * NS[unit_of_slowest], int(calls)
            for ns in [most, *[(float(total) * NS[unit] - most) / max(1, n - 1)] * (n - 1)]:
                note(box, names.index(connector), hook, now - 40 * 10**9, round(ns))
        box.words[box.marks(1, "wait_for_save")], box.words[layout.LOOKED] = now - 34 * 10**9, now
        os._exit(0)
    os.waitpid(pid, 0)
    assert len(rows) == 8
    assert not_printed(shown, kvobs("timeline")) == []


def test_page_sizes_and_span_limits_are_those_of_the_code() -> None:
    (power,) = re.findall(r"^CALLS = 1 << (\d+)$", Path(layout.__file__).read_text(), re.MULTILINE)  # tests have less
    calls = 1 << int(power)
    assert f"A page has {calls:,} calls" in TEXTS["docs/on-call.md"]
    process = dataclasses.replace(writer.describe(writer.plain(["cpu", "nixl"]), 0), calls=calls)
    mib = f"{writer.size_of(process) / 2**20:.1f} MiB"
    for page in ("exporter", "on-call", "capacity", "engine", "performance"):
        assert mib in TEXTS[f"docs/{page}.md"], page
    (limits,) = (part for part in paragraphs(TEXTS["docs/requests.md"]) if part.startswith("- **Limits.**"))
    sizes = [size // 1024 for size in SPAN_BYTES]
    assert numbers(limits) == [*sizes, PER_SECOND, RESERVED, PER_SECOND]


AUTOSCALER, HOOK = (
    yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", TEXTS["docs/capacity.md"], re.DOTALL)
)
OPEN = """# TYPE kvobs_in_flight gauge
kvobs_in_flight{connector="nixl",kind="load"} 7.0
kvobs_in_flight{connector="nixl",kind="save"} %s
kvobs_in_flight{connector="cpu",kind="save"} 0.0
"""


@pytest.mark.tools
def test_the_autoscalers_queries_give_one_number_for_all_engines(tmp_path: Path) -> None:
    found = {trigger["name"]: trigger["metadata"]["query"] for trigger in AUTOSCALER["spec"]["triggers"]}
    kinds = {
        "unread": 'kvobs_held_tokens{kind="save"',
        "loaded-not-running": 'kvobs_in_flight{kind="awaiting_schedule"',
    }
    for name, metric in kinds.items():
        of = [f'{metric},namespace="{space}",job="j",instance="{i}"}}' for space in ("llm", "other") for i in "ab"]
        series = {key: f"{10**n}+0x20" for n, key in enumerate(of)}
        assert answers(tmp_path, series, found[name]) == {"": 11}


@pytest.mark.parametrize(("saves", "seconds"), [("0.0", 0), ("2.0", 120), ("0.0\n# EOF", 0)])
def test_an_engine_whose_saves_are_read_may_go_at_once(saves: str, seconds: int, tmp_path: Path) -> None:
    """The hook waits as long as any is open; it sees the exporter's text by curl."""
    (tmp_path / "metrics").write_text(OPEN % saves)
    for name, does in {"curl": f"cat {tmp_path}/metrics", "sleep": f"echo >> {tmp_path}/slept"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(HOOK["lifecycle"]["preStop"]["exec"]["command"], env={"PATH": path}, check=True, timeout=30)
    slept = tmp_path / "slept"
    assert (len(slept.read_text().splitlines()) if slept.exists() else 0) == seconds


def test_the_summary_in_vllms_log_has_its_keys_in_their_order() -> None:
    lines = " ".join(sample("docs/metrics.md", "engine 000, connector cpu")).split("engine 000, ")[1:]
    (known,) = summarize(["cpu"], [10**9] * signals.word(1, 0), {}).values()
    assert len(lines) == 2
    for line in lines:
        keys = re.findall(r"(\w+)=", line)
        assert keys == [key for key in known if key in keys]
