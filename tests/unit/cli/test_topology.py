"""Who reads from whom, as it is printed: against what the arithmetic says, for every kind of pair."""

import io
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from kvobs.cli import app
from kvobs.cli.topology import Pair, as_dict, describe, find_unread, lay_out, read_model
from kvobs.topology import Engine, heads_of

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64]
HEADS = [1, 2, 3, 4, 6, 8, 16, 24, 64, 128]


def fits(*pairs: tuple[int, int]) -> bool:
    return all(one % other == 0 or other % one == 0 for one, other in pairs)


SHAPES = [(p, d, k) for p in SIZES for d in SIZES for k in HEADS if fits((p, d), (p, k), (d, k))]


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    prefill, decode, heads = draw(st.sampled_from(SHAPES))
    size, times = draw(st.sampled_from([1, 16, 48, 128])), draw(st.sampled_from([1, 2, 3, 16]))
    return Pair(Engine(prefill, size), Engine(decode, size * times), heads, draw(st.booleans()))


def total(pair: Pair) -> int:
    return 1 if pair.is_mla else pair.kv_heads


@given(pairs())
def test_the_data_has_the_reads_of_the_arithmetic(pair: Pair) -> None:
    data = json.loads(json.dumps(as_dict(pair)))
    for row, read in zip(data["reads"], pair.reads(), strict=True):
        needed = heads_of(read.rank, pair.decode.tp_size, total(pair))
        assert (row["rank"], row["blocks"]) == (read.rank, read.blocks)
        assert row["heads"] == [needed[0], needed[-1]]
        assert row["sources"] == [
            {"rank": source, "heads": [heads[0], heads[-1]]}
            for source, heads in zip(read.sources, read.heads, strict=True)
        ]
    for name, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        holders = [rank for rank in range(engine.tp_size) if 0 in heads_of(rank, engine.tp_size, total(pair))]
        assert data[name]["ranks_per_head"] == len(holders)
        assert (data[name]["tp_size"], data[name]["block_size"]) == engine


@given(pairs())
def test_a_prefill_rank_is_read_from_or_named_as_a_copy_of_one_that_is(pair: Pair) -> None:
    idle = find_unread(pair)
    sources = {source for read in pair.reads() for source in read.sources}
    named = [rank for ranks in idle for rank in ranks]
    assert sorted([*named, *sources]) == list(range(pair.prefill.tp_size))
    read_heads = {heads_of(source, pair.prefill.tp_size, total(pair)) for source in sources}
    assert all(heads_of(rank, pair.prefill.tp_size, total(pair)) in read_heads for rank in named)
    assert all(ranks.stop < following.start for ranks, following in pairwise(idle)), "one range in two"


@given(pairs())
def test_a_row_is_a_read_and_all_of_it_fits_on_a_plain_terminal(pair: Pair) -> None:
    def words(heads: range, is_mla: bool = pair.is_mla) -> str:
        if is_mla:
            return "latent"
        return str(heads[0]) if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"

    file = io.StringIO()
    Console(file=file, width=80).print(lay_out(pair))
    output = file.getvalue()
    assert max(map(len, output.splitlines())) <= 80
    assert "…" not in output
    assert "\x1b" not in output
    table = output.partition("─\n")[2].partition("\n\n")[0]
    assert [line.split() for line in table.splitlines()] == [
        [
            *(str(read.rank), words(heads_of(read.rank, pair.decode.tp_size, total(pair)))),
            *(words(heads), str(source), str(read.blocks)),
        ]
        for read in pair.reads()
        for source, heads in zip(read.sources, read.heads, strict=True)
    ]
    text = " ".join(output.split())
    assert text.startswith(describe(pair))
    idle = ", ".join(words(ranks, is_mla=False) for ranks in find_unread(pair))
    assert text.endswith(f"since they hold copies: {idle}.") if idle else "copies: " not in text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_key_value_heads": 8, "num_attention_heads": 32}, (8, False)),
        ({"num_key_value_heads": 8, "kv_lora_rank": None}, (8, False)),
        ({"num_key_value_heads": 128, "kv_lora_rank": 512}, (1, True)),
        ({"text_config": {"num_key_value_heads": 4}, "num_key_value_heads": 16}, (4, False)),
        ({"text_config": {"kv_lora_rank": 512}}, (1, True)),
    ],
)
def test_a_model_says_how_many_heads_it_has(tmp_path: Path, config: dict[str, Any], expected: tuple[int, bool]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "config.json is not valid JSON: Expecting property name"),
        ('{"text_config": 8}', "config.json has no model configuration"),
        ("{}", "num_key_value_heads is null, must be .* --kv-heads N"),
        ('{"text_config": {}, "num_key_value_heads": 8}', "num_key_value_heads is null, must be"),
        *((f'{{"num_key_value_heads": {text}}}', re.escape(f"num_key_value_heads is {text}, must be"))
          for text in ('"8"', "true", "0", "[4, 8]")),
    ],
)  # fmt: skip
def test_a_config_without_the_numbers_is_refused_by_its_path(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=says) as caught:
        read_model(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


def test_a_folder_that_is_none_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    for folder, reason in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError, match=f"^{folder}/config.json: {reason}.*; give the folder of a model"):
            read_model(folder)


def kvobs(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["topology", *arguments])
    return result.exit_code, result.output


PAIR = ("--prefill-tp", "4", "--decode-tp", "2")


def test_the_command_prints_json_for_scripts() -> None:
    code, output = kvobs(*PAIR, "--kv-heads", "2", "--decode-block-size", "32", "--json")
    assert code == 0
    assert json.loads(output) == {
        "prefill": {"tp_size": 4, "block_size": 16, "ranks_per_head": 2, "unread": [[1, 1], [3, 3]]},
        "decode": {"tp_size": 2, "block_size": 32, "ranks_per_head": 1},
        "reads": [
            {"rank": 0, "heads": [0, 0], "sources": [{"rank": 0, "heads": [0, 0]}], "blocks": 2},
            {"rank": 1, "heads": [1, 1], "sources": [{"rank": 2, "heads": [1, 1]}], "blocks": 2},
        ],
    }


@pytest.mark.parametrize(
    ("config", "same_as"),
    [({"num_key_value_heads": 8}, ["--kv-heads", "8"]), ({"kv_lora_rank": 512}, ["--mla", "--kv-heads", "128"])],
    ids=["heads", "mla"],
)
def test_the_command_takes_the_numbers_from_a_model(tmp_path: Path, config: dict[str, int], same_as: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, output = kvobs(*PAIR, "--model", str(tmp_path))
    assert (code, output) == kvobs(*PAIR, *same_as)
    assert code == 0
    assert ("latent" in output) is ("--mla" in same_as)
    (tmp_path / "config.json").write_text('{"num_key_value_heads": 3}')
    code, output = kvobs(*PAIR, "--model", str(tmp_path))
    assert code == 1
    assert output.startswith("TP size 2 of engine decode with 3 KV heads")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("3 --decode-tp 4 --kv-heads 8", "TP size 3 of engine prefill with 8 KV heads: one must be"),
        ("4 --decode-tp 3 --kv-heads 8", "TP size 3 of engine decode with 8 KV heads: one must"),
        ("4 --decode-tp 3 --kv-heads 12", "TP size 3 of engine decode and 4 of engine prefill: one must"),
        ("4 --decode-tp 3 --mla", "TP size 3 of engine decode and 4 of engine prefill: one must"),
        ("4 --decode-tp 4 --mla --prefill-block-size 32", "block size 16 of engine decode and 32 of engine prefill:"),
        ("4 --decode-tp 4 --model /nowhere", "/nowhere/config.json: No such file.*; give the folder"),
    ],
)
def test_the_command_says_which_numbers_do_not_fit(arguments: str, says: str) -> None:
    """In one line on stderr, with exit code 1, nothing on stdout and no traceback."""
    result = CliRunner().invoke(app, ["topology", "--prefill-tp", *arguments.split(), "--json"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert re.fullmatch(f"{says}.*\n", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("4 --decode-tp 2", "--kv-heads, --mla, --model: give"),
        *((f"4 --decode-tp 2 --model . {more}", "--model: give it without") for more in ("--mla", "--kv-heads 8")),
        ("4 --decode-tp 2 --kv-heads 0", "--kv-heads"), ("4 --decode-tp 0 --mla", "--decode-tp"),
        ("1025 --decode-tp 1 --mla", "--prefill-tp"), ("4 --mla", "--decode-tp"),
    ],
)  # fmt: skip
def test_the_command_refuses_options_that_make_no_pair(arguments: str, says: str) -> None:
    code, output = kvobs("--prefill-tp", *arguments.split())
    assert code == 2
    assert says in " ".join(re.sub(r"\x1b\[[0-9;]*m", "", output).split())


def test_the_command_needs_no_vllm() -> None:
    """It runs wherever kvobs is installed; piped, without colours."""
    code = "import sys; sys.modules['vllm'] = sys.modules['torch'] = None; from kvobs.cli import app; app()"
    command = [sys.executable, "-c", code, "topology", *PAIR, "--kv-heads", "8"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert out.stdout.startswith("8 KV heads, no copies; ")
    assert "\x1b" not in out.stdout
