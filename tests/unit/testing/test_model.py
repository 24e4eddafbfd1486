"""The model made on the spot: its files, its tokenizer, its answers."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvobs.testing import model

TOKENIZER = model.tokenizer()
SPECIAL = ("<s>", "</s>", "<unk>")


def test_the_same_model_comes_out_every_time(tmp_path: Path) -> None:
    """Or answers could not be compared between runs."""
    one, two = model.make_model(tmp_path / "one"), model.make_model(tmp_path / "two")
    names = sorted(path.name for path in one.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_a_finished_model_is_kept_and_a_partial_one_made_anew(tmp_path: Path) -> None:
    """A folder without config.json was left by an interrupted run."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"half")
    model.make_model(tmp_path)
    assert weights.stat().st_size > 1_000_000
    weights.write_bytes(b"mine")
    model.make_model(tmp_path)
    assert weights.read_bytes() == b"mine"


@given(st.text(max_size=200).filter(lambda text: not any(special in text for special in SPECIAL)))
@settings(max_examples=200, deadline=None)
def test_every_byte_is_one_token_and_comes_back(text: str) -> None:
    """Prompt lengths in tokens are lengths in UTF-8 bytes, for any text without a special token's name in it."""
    encoded = TOKENIZER.encode(text, add_special_tokens=False)
    assert [token - model.FIRST_BYTE for token in encoded.ids] == list(text.encode())
    assert TOKENIZER.decode(encoded.ids) == text


def test_the_model_answers_in_printable_characters_only() -> None:
    """All 95 of them and nothing else, no end of text either: every answer has the length that was asked for."""
    assert TOKENIZER.decode(np.flatnonzero(model.printable()).tolist()) == "".join(chr(code) for code in range(32, 127))
    assert all(len(TOKENIZER.encode(special, add_special_tokens=False).ids) == 1 for special in SPECIAL)
    assert not dict(model.weights(np.random.default_rng(0), 1, 64))["lm_head.weight"][~model.printable()].any()
