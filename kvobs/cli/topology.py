"""The command ``kvobs topology``: which rank reads from which, as text and as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvobs.cli.output import count, examples, fail
from kvobs.topology import Engine, Read, who_reads

EXAMPLES = examples(
    "kvobs topology --prefill-tp 4 --decode-tp 2 --kv-heads 8",
    "kvobs topology --prefill-tp 8 --decode-tp 2 --model ./DeepSeek-V3",
)
TpSize = Annotated[int, typer.Option(min=1, max=1024, help="Tensor parallel size.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per KV cache block.")]
COLUMNS: dict[str, Literal["left", "right"]] = {
    "decode\nrank": "right",
    "KV heads\nit holds": "left",
    "KV heads\nit reads": "left",
    "from\nprefill rank": "right",
    "prefill blocks\nper block": "right",
}


def topology(
    *,
    prefill_tp: TpSize,
    decode_tp: TpSize,
    prefill_block_size: BlockSize = 16,
    decode_block_size: BlockSize = 16,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="KV heads of the model.")] = None,
    mla: Annotated[bool, typer.Option("--mla", help="The model uses MLA: one latent for all heads.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Its folder, whose config.json has both.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a range is [first, last].")] = False,
) -> None:
    """Print which decode rank reads which KV heads from which prefill ranks."""
    if model is None and kv_heads is None and not mla:
        raise typer.BadParameter("give --kv-heads, --mla or --model", param_hint="--kv-heads, --mla, --model")
    if model is not None and (kv_heads is not None or mla):
        raise typer.BadParameter("give it without --kv-heads and --mla: its config.json has both", param_hint="--model")
    try:
        heads, is_mla = read_model(model) if model else (kv_heads or 1, mla)
        pair = Pair(Engine(prefill_tp, prefill_block_size), Engine(decode_tp, decode_block_size), heads, is_mla)
        pair.reads()
    except ValueError as error:
        raise fail(str(error)) from None
    if as_json:
        typer.echo(json.dumps(as_dict(pair)))
    else:
        Console().print(lay_out(pair))


class Pair(NamedTuple):
    """Two engines of which one reads from the other, and their model."""

    prefill: Engine
    decode: Engine
    kv_heads: int
    is_mla: bool = False

    def reads(self) -> list[Read]:
        """Return the reads of each decode rank; ValueError if the sizes don't fit."""
        return who_reads(self.prefill, self.decode, self.kv_heads, is_mla=self.is_mla)

    def ranks_per_head(self, engine: Engine) -> int:
        """Return how many ranks of an engine hold the same heads."""
        return max(1, engine.tp_size // (1 if self.is_mla else self.kv_heads))


def lay_out(pair: Pair) -> Group:
    """Return the text output: a summary, one row per read, and the ranks that are not read."""
    parts: list[RenderableType] = [Text(describe(pair)), Text(), make_table(pair)]
    if idle := find_unread(pair):
        ranks = ", ".join(map(_write_range, idle))
        parts += [Text(), Text(f"Prefill ranks that no decode rank reads, since they hold copies: {ranks}.")]
    return Group(*parts)


def as_dict(pair: Pair) -> dict[str, Any]:
    """Return the output as plain data, ranges as [first, last]; MLA's latent is head 0."""
    prefill, decode = (
        engine._asdict() | {"ranks_per_head": pair.ranks_per_head(engine)} for engine in (pair.prefill, pair.decode)
    )
    rows = [
        {
            "rank": read.rank,
            "heads": _first_and_last(_all_heads(read)),
            "sources": [
                {"rank": source, "heads": _first_and_last(heads)}
                for source, heads in zip(read.sources, read.heads, strict=True)
            ],
            "blocks": read.blocks,
        }
        for read in pair.reads()
    ]
    return {
        "prefill": prefill | {"unread": [_first_and_last(ranks) for ranks in find_unread(pair)]},
        "decode": decode,
        "reads": rows,
    }


def describe(pair: Pair) -> str:
    """Return a sentence on how the engines' ranks, copies and blocks relate; the sizes must fit."""
    prefill, decode, kv_heads, is_mla = pair
    many, few = ("prefill", "decode") if prefill.tp_size >= decode.tp_size else ("decode", "prefill")
    ratio = max(prefill.tp_size, decode.tp_size) // min(prefill.tp_size, decode.tp_size)
    holders = [pair.ranks_per_head(engine) for engine in (prefill, decode)]
    copies = f"on {count(holders[0], 'prefill rank')} and {count(holders[1], 'decode rank')}"
    if is_mla:
        held = f"MLA, the latent {copies}"
    else:
        held = f"{count(kv_heads, 'KV head')}, {'no copies' if holders == [1, 1] else f'each {copies}'}"
    size = f"of {count(prefill.block_size, 'token')}"
    filling = decode.block_size // prefill.block_size
    blocks = f"blocks {size}" if filling == 1 else f"{filling} prefill blocks {size} to a decode block"
    return f"{held}; {count(ratio, f'{many} rank')} to a {few} rank; {blocks}."


def make_table(pair: Pair) -> Table:
    """Return a table with one read per row: a decode rank has a row for each rank it reads from."""
    out = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
    for column, justify in COLUMNS.items():
        out.add_column(column, justify=justify, no_wrap=True, vertical="bottom")
    for read in pair.reads():
        for source, heads in zip(read.sources, read.heads, strict=True):
            cells = ["latent", "latent"] if pair.is_mla else [_write_range(_all_heads(read)), _write_range(heads)]
            out.add_row(str(read.rank), *cells, str(source), str(read.blocks))
    return out


def find_unread(pair: Pair) -> list[range]:
    """Return the prefill ranks that are not read, as ranges: they hold copies only."""
    sources = {source for read in pair.reads() for source in read.sources}
    idle: list[range] = []
    for rank in sorted(set(range(pair.prefill.tp_size)) - sources):
        if idle and idle[-1].stop == rank:
            idle[-1] = range(idle[-1].start, rank + 1)
        else:
            idle.append(range(rank, rank + 1))
    return idle


def read_model(folder: Path) -> tuple[int, bool]:
    """Return how many KV heads a model has, and whether it uses MLA, by the ``config.json`` in its folder."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give the folder of a model, with its config.json") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    # Multimodal models have their language model's numbers in a sub-object.
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        raise ValueError(f"{path} has no model configuration")
    if text.get("kv_lora_rank") is not None:
        return 1, True
    heads = text.get("num_key_value_heads")
    if type(heads) is not int or heads < 1:
        raise ValueError(
            f"{path}: num_key_value_heads is {json.dumps(heads)}, must be an integer of at least 1 "
            "(or kv_lora_rank must be set, for MLA); otherwise give --kv-heads N"
        )
    return heads, False


def _all_heads(read: Read) -> range:
    """Return the KV heads that a decode rank holds: those it reads, which follow one another."""
    return range(read.heads[0].start, read.heads[-1].stop)


def _first_and_last(numbers: Sequence[int]) -> list[int]:
    return [numbers[0], numbers[-1]]


def _write_range(numbers: range) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])
