"""Render which rank reads from which, as text and as JSON, for ``kvobs topology``."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvobs.topology import Engine, Read, who_reads

COLUMNS: dict[str, Literal["left", "right"]] = {
    "decode\nrank": "right",
    "KV heads\nit holds": "left",
    "KV heads\nit reads": "left",
    "from\nprefill rank": "right",
    "prefill blocks\nper block": "right",
}


def lay_out(prefill: Engine, decode: Engine, kv_heads: int, *, is_mla: bool = False) -> Group:
    """Return the text output: a summary, one row per read, and the ranks that are not read."""
    reads = who_reads(prefill, decode, kv_heads, is_mla=is_mla)
    parts: list[RenderableType] = [
        Text(facts(prefill, decode, kv_heads, is_mla=is_mla)),
        Text(),
        table(reads, is_mla=is_mla),
    ]
    if idle := unread(prefill, reads):
        ranks = ", ".join(map(_words, idle))
        parts += [Text(), Text(f"Prefill ranks that no decode rank reads, since they hold copies: {ranks}.")]
    return Group(*parts)


def as_dict(prefill: Engine, decode: Engine, kv_heads: int, *, is_mla: bool = False) -> dict[str, Any]:
    """Return the output as plain data, ranges as [first, last]; MLA's latent is head 0."""
    reads = who_reads(prefill, decode, kv_heads, is_mla=is_mla)
    sizes = {
        name: engine._asdict() | {"ranks_per_head": _ranks_per_head(engine, kv_heads, is_mla=is_mla)}
        for name, engine in (("prefill", prefill), ("decode", decode))
    }
    sizes["prefill"]["unread"] = [_ends(ranks) for ranks in unread(prefill, reads)]
    rows = [
        {
            "rank": read.rank,
            "heads": _ends(_needed(read)),
            "sources": [
                {"rank": source, "heads": _ends(heads)} for source, heads in zip(read.sources, read.heads, strict=True)
            ],
            "blocks": read.blocks,
        }
        for read in reads
    ]
    return {**sizes, "reads": rows}


def facts(prefill: Engine, decode: Engine, kv_heads: int, *, is_mla: bool = False) -> str:
    """Return a sentence on how the engines' ranks, copies and blocks relate; the sizes must fit (see ``who_reads``)."""
    many, few = ("prefill", "decode") if prefill.tp_size >= decode.tp_size else ("decode", "prefill")
    ratio = max(prefill.tp_size, decode.tp_size) // min(prefill.tp_size, decode.tp_size)
    holders = [_ranks_per_head(engine, kv_heads, is_mla=is_mla) for engine in (prefill, decode)]
    copies = f"on {_count(holders[0], 'prefill rank')} and {_count(holders[1], 'decode rank')}"
    if is_mla:
        held = f"MLA, the latent {copies}"
    else:
        held = f"{_count(kv_heads, 'KV head')}, {'no copies' if holders == [1, 1] else f'each {copies}'}"
    size = f"of {_count(prefill.block_size, 'token')}"
    filling = decode.block_size // prefill.block_size
    blocks = f"blocks {size}" if filling == 1 else f"{filling} prefill blocks {size} to a decode block"
    return f"{held}; {_count(ratio, f'{many} rank')} to a {few} rank; {blocks}."


def table(reads: Iterable[Read], *, is_mla: bool = False) -> Table:
    """Return a table with one read per row: a decode rank has a row for each rank it reads from."""
    out = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), pad_edge=False)
    for column, justify in COLUMNS.items():
        out.add_column(column, justify=justify, no_wrap=True, vertical="bottom")
    for read in reads:
        for source, heads in zip(read.sources, read.heads, strict=True):
            needed, taken = ("latent", "latent") if is_mla else (_words(_needed(read)), _words(heads))
            out.add_row(str(read.rank), needed, taken, str(source), str(read.blocks))
    return out


def unread(prefill: Engine, reads: Iterable[Read]) -> list[range]:
    """Return the prefill ranks that are not read, as ranges: they hold copies only."""
    sources = {source for read in reads for source in read.sources}
    found: list[range] = []
    for rank in range(prefill.tp_size):
        if rank in sources:
            continue
        if found and found[-1].stop == rank:
            found[-1] = range(found[-1].start, rank + 1)
        else:
            found.append(range(rank, rank + 1))
    return found


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


def _ranks_per_head(engine: Engine, kv_heads: int, *, is_mla: bool) -> int:
    """Return how many ranks of an engine hold the same heads."""
    return max(1, engine.tp_size // (1 if is_mla else kv_heads))


def _needed(read: Read) -> range:
    """Return the KV heads that a decode rank holds: those it reads, which follow one another."""
    return range(read.heads[0].start, read.heads[-1].stop)


def _ends(numbers: Sequence[int]) -> list[int]:
    return [numbers[0], numbers[-1]]


def _words(numbers: range) -> str:
    return f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else str(numbers[0])


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
