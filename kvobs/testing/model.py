"""Create a tiny Llama with random weights: quick to load, with answers that depend strongly on its KV cache.

It is created without torch or transformers, in a fraction of a second and with the same bytes everywhere.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "tiny"
"""The name under which the server offers the model."""

SEED = 20_260_101
BOS, EOS, UNK = 0, 1, 2
FIRST_BYTE = 3
"""Token id of byte 0; byte b is token FIRST_BYTE + b in the order of `alphabet()`."""

LAYERS = 4
HIDDEN = 256
KV_HEADS = 2  # two, so that tensor parallel 2 gives each rank one
HEAD_DIM = 64
MLP = 512
VOCAB = FIRST_BYTE + 256

Array = npt.NDArray[np.float32]


def make_model(path: Path, layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    """Write the model and its tokenizer to a folder, unless a complete one is there already; return the folder.

    Takes about a tenth of a second. The folder counts as complete once `config.json` is in it, which is written last.
    The width, ``hidden``, is a multiple of 64.
    """
    if (path / "config.json").exists():
        return path
    from safetensors.numpy import save_file

    path.mkdir(parents=True, exist_ok=True)
    tensors = dict(weights(np.random.default_rng(SEED), layers, hidden))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", TOKENIZER_CONFIG)
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": hidden // HEAD_DIM}
    write_json(path / "config.json", CONFIG | sizes)
    return path


def weights(rng: np.random.Generator, layers: int, hidden: int) -> Iterator[tuple[str, Array]]:
    """Yield each tensor with its name in Llama's checkpoint.

    Scaled by fan-in rather than by the usual 0.02: attention then weighs as much as the token itself, so that one
    wrong KV block changes the answer, which tests that compare answers rely on.
    """

    def matrix(rows: int, columns: int) -> Array:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    yield "model.embed_tokens.weight", rng.standard_normal((VOCAB, hidden), dtype=np.float32)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{name}.self_attn.q_proj.weight", matrix(hidden, hidden)
        yield f"{name}.self_attn.k_proj.weight", matrix(KV_HEADS * HEAD_DIM, hidden)
        yield f"{name}.self_attn.v_proj.weight", matrix(KV_HEADS * HEAD_DIM, hidden)
        yield f"{name}.self_attn.o_proj.weight", matrix(hidden, hidden)
        yield f"{name}.post_attention_layernorm.weight", np.ones(hidden, np.float32)
        yield f"{name}.mlp.gate_proj.weight", matrix(MLP, hidden)
        yield f"{name}.mlp.up_proj.weight", matrix(MLP, hidden)
        yield f"{name}.mlp.down_proj.weight", matrix(hidden, MLP)
    yield "model.norm.weight", np.ones(hidden, np.float32)
    head = matrix(VOCAB, hidden)
    head[~printable()] = 0
    yield "lm_head.weight", head


def printable() -> npt.NDArray[np.bool_]:
    """Return for each token whether the model may answer with it: printable ASCII, so that every token is whole text.

    Half a character would be held back by the server until the rest arrives, and would spoil times to first token.
    """
    return np.array([False] * FIRST_BYTE + [ord(" ") <= byte <= ord("~") for byte in range(256)])


def alphabet() -> list[str]:
    """Return the 256 characters that stand for the bytes in a byte-level tokenizer, as GPT-2 defined them."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in visible)
    shifted = {byte: 256 + index for index, byte in enumerate(hidden)}
    return [chr(shifted.get(byte, byte)) for byte in range(256)]


def tokenizer() -> "Tokenizer":
    """Return a byte-level tokenizer without merges: one token for each byte of the prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = {"<s>": BOS, "</s>": EOS, "<unk>": UNK}
    vocab = specials | {char: FIRST_BYTE + byte for byte, char in enumerate(alphabet())}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(specials))
    return made


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 4096,
}

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "intermediate_size": MLP,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def write_json(path: Path, content: object) -> None:
    """Write a JSON file in one go, so that no reader ever sees half of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1))
    os.replace(part, path)
