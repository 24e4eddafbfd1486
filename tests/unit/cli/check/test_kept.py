"""What vLLM's classes said is kept until anything that it depends on changes, and is safe to delete."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvobs.cli.check import asker as asking_once
from kvobs.cli.check import kept, vllm_source
from kvobs.cli.check.asker import Asker
from kvobs.cli.check.asking import Asking, NoAnswerError, here
from kvobs.cli.check.check import check
from kvobs.cli.check.facts import as_dict, from_dict
from kvobs.config import PATH

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
SOURCE = """
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class Mine(ExampleConnector):
    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return {answer}
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write a connector of somebody's own; return its file."""
    path = tmp_path / "somebodys_connector.py"
    path.write_text(SOURCE.format(answer=True))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("somebodys_connector", None)


MINE = {"kv_connector": "Mine", "kv_role": "kv_both", "kv_connector_module_path": "somebodys_connector"}


def ask(entry: dict[str, Any]) -> Any:
    """Ask as the command does, and return what it knows of the entry's class."""
    asker = Asker(entry)
    return check(entry, ask=asker.answers).children[0].facts


def known(entry: dict[str, Any]) -> Any:
    return kept.read(entry, has_hisparse=False)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_once, "here", lambda _: pytest.fail("vLLM was asked again"))


def test_the_second_look_asks_nobody_and_says_the_same(no_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as first:
        first.setattr(asking_once, "here", here)
        said = ask(NIXL)
        assert said == check(NIXL).children[0].facts
    assert said is not None
    assert ask(NIXL) == said


def test_options_of_kvobs_do_not_make_it_ask_again(no_vllm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**options: Any) -> dict[str, Any]:
        extra = {"connectors": [NIXL], "kvobs": options}
        return {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": "kvobs",
            "kv_role": "kv_both",
            PATH: extra,
        }

    with monkeypatch.context() as first:
        first.setattr(asking_once, "here", here)
        ask(config())
    assert ask(config(load_policy="longest")) is not None


def test_a_class_whose_file_changes_is_asked_again(mine: Path) -> None:
    """Even where size and time stay as they were."""
    assert ask(MINE).requires_piecewise is True
    state = mine.stat()
    assert known(MINE) is not None
    mine.write_text(SOURCE.format(answer=None))
    os.utime(mine, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert mine.stat().st_size == state.st_size
    assert known(MINE) is None
    importlib.invalidate_caches()
    del sys.modules["somebodys_connector"]
    for path in mine.parent.glob("__pycache__/*"):  # Python, too, looks at the time and size only
        path.unlink()
    assert ask(MINE).requires_piecewise is False


def test_a_class_whose_file_is_gone_is_asked_again(mine: Path) -> None:
    ask(MINE)
    mine.unlink()
    assert known(MINE) is None


@pytest.mark.parametrize("change", ["variable", "version", "entry", "hisparse", "kvobs"])
def test_what_an_answer_depends_on_makes_it_another(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(NIXL)
    assert known(NIXL) is not None
    entry, has_hisparse = dict(NIXL), change == "hisparse"
    if change == "variable":
        monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    elif change == "version":
        monkeypatch.setattr(vllm_source, "vllm_version", lambda: "9.9.9")
    elif change == "kvobs":
        monkeypatch.setattr(kept, "__version__", "9.9.9")
    elif change == "entry":
        entry["kv_role"] = "kv_producer"
    assert kept.read(entry, has_hisparse=has_hisparse) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"files": {}, "answer": {}}', '{"files": {"/": 1}}'])
def test_whatever_is_in_the_file_the_answer_is_right(text: str, cache: Path) -> None:
    said = ask(NIXL)
    (path,) = (cache / "kvobs" / "check").iterdir()
    path.write_text(text)
    assert known(NIXL) is None
    assert ask(NIXL) == said


def test_a_class_that_can_not_be_used_is_not_kept(cache: Path) -> None:
    ask({**NIXL, "kv_connector": "Nope"})
    ask({**NIXL, "kv_connector_module_path": "no.such"})
    assert not (cache / "kvobs").exists()


def test_no_value_of_the_configuration_is_kept(cache: Path) -> None:
    ask({**NIXL, PATH: {"password": "hunter2"}})
    (path,) = (cache / "kvobs" / "check").iterdir()
    assert "hunter2" not in path.read_text() + path.name
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)


def test_without_a_folder_it_works_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert ask(NIXL) is not None
    assert known(NIXL) is None


def test_the_oldest_answers_are_forgotten(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MOST", 2)
    for role in ("kv_producer", "kv_consumer", "kv_both"):
        ask({**NIXL, "kv_role": role})
    assert len(list((cache / "kvobs" / "check").iterdir())) == 2
    assert known(NIXL) is not None


def test_a_process_of_its_own_answers_as_this_one_does() -> None:
    questions = [(NIXL, False), ({**NIXL, "kv_connector": "Nope"}, False)]
    asking = Asking(questions)
    answers = [answer for answer, _ in asking.answers()]
    assert answers == [answer for answer, _ in here(questions)]
    assert [from_dict(json.loads(json.dumps(as_dict(answer)))) for answer in answers] == answers


def test_a_process_that_fails_has_its_last_line_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('libcuda.so.1 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NoAnswerError, match=r"libcuda.so.1 is missing \(exit status 1\)"):
        Asking([(NIXL, False)]).answers()


def test_what_is_stopped_is_gone() -> None:
    asking = Asking([(NIXL, False)])
    asking.stop()
    asking.stop()
    assert asking._process.poll() is not None
