"""Read the configuration that `kvobs check` is given, and change it to use kvobs.

It may be JSON, a `vllm serve` line or script, or vLLM's YAML file. A line and a YAML file may have other options of
vLLM that matter to the check; these are read too.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.children.known import OURS, ROUTER
from kvobs.schema.config import PATH, ConfigError
from kvobs.schema.config import read as read_extra
from kvobs.vllm_api.versions import TransferConfig

_OPTION = "kv-transfer-config"
_FLAGS = ("disable-log-stats", "otlp-traces-endpoint", "api-server-count", "tensor-parallel-size")
_SHORT = {"tp": "tensor-parallel-size", "asc": "api-server-count"}
_IN_LINE = re.compile(r"(^|\s)--kv[-_]transfer[-_]config\b")
_IN_YAML = re.compile(r"^\s*(kv[-_]transfer[-_]config|kv_connector)\s*:", re.MULTILINE)


class Source(NamedTuple):
    """A configuration, and vLLM's other options beside it, by name without dashes in front."""

    config: Mapping[str, Any]
    flags: Mapping[str, Any]


def read(argument: str) -> Source:
    """Read the configuration that the argument CONFIG names or is.

    Raises:
        ValueError: it can't be read, or has no valid configuration; with the reason.
    """
    return parse(_text(argument))


def _text(argument: str) -> str:
    if not argument.strip():
        raise ValueError("the configuration is empty")
    if argument == "-":
        return sys.stdin.read()
    if argument.lstrip()[:1] in tuple("{['\"`") or _IN_LINE.search(argument):
        return argument
    try:
        if "\n" in argument and not Path(argument).exists():
            return argument
        data = Path(argument).read_bytes()
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not a name of a file"
        raise ValueError(f"{argument[:200]}: {problem}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{argument} is not UTF-8 text") from None


def parse(text: str) -> Source:
    """Return the configuration in a text; raise ``ValueError`` as ``read`` does."""
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise ValueError("the configuration is empty")
    if text.lstrip()[0] in "{[":
        return Source(_object(text), {})
    if _IN_LINE.search(text):
        return _line(text)
    if _IN_YAML.search(text):
        return _yaml(text)
    if re.match(r"\s*(vllm\s+serve|python\S*\s+-m\s+vllm)\b", text):
        raise ValueError("the vllm line has no --kv-transfer-config; if it has --config, check the file named there")
    return Source(_object(text), {})


def _object(text: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except RecursionError:
        raise ValueError("the configuration is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the configuration is not valid JSON: {_slip(text)}{error}") from None
    return _checked(config)


def _checked(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, dict):
        raise ValueError(f"the configuration is a {type(config).__name__}, needs an object with the key 'kv_connector'")
    return config


def _slip(text: str) -> str:
    """Return the usual slip that keeps a text from being JSON, or an empty text."""
    if _is_object(json.loads, re.sub(r",(?=\s*[}\]])", "", text)):
        return "it has a comma before a closing bracket: "
    if _is_object(ast.literal_eval, text.strip()):
        return "it is written as in Python; JSON has double quotes, true, false and null: "
    if re.fullmatch(r"""\s*(['"`])\s*\{.*\}\s*\1\s*""", text, re.DOTALL):
        return "it has quotes around it, remove them: "
    if re.match(r"\s*\{\s*[A-Za-z_]\w*\s*:", text):
        return "its quotes are missing, as if a shell had removed them, put it in single quotes: "
    return ""


def _is_object(parse: Callable[[str], Any], text: str) -> bool:
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        return isinstance(parse(text), dict)
    return False


def _line(text: str) -> Source:
    """Read a shell's line, or a script with one: the option as JSON, or its parts by dotted names."""
    try:
        words = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"the line has a quote that is not closed: {error}") from None
    config: dict[str, Any] | None = None
    flags: dict[str, Any] = {}
    for name, value in _options(words):
        key, _, rest = name.partition(".")
        if key == _OPTION and rest:
            config = {} if config is None else config
            _put(config, rest.split("."), value)
        elif key == _OPTION:
            if value is None:
                raise ValueError("--kv-transfer-config has no value")
            config = dict(_object(value))
        elif key in _FLAGS:
            flags[key] = True if value is None else value
    if config is None:
        raise ValueError("the line has no --kv-transfer-config that can be read")
    return Source(config, flags)


def _options(words: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield each option of a command line with its value; None if it has none."""
    for i, word in enumerate(words):
        if not word.startswith("-"):
            continue
        name, is_one_word, value = word.lstrip("-").partition("=")
        key, dot, rest = name.partition(".")
        key = key.replace("_", "-")
        following = words[i + 1] if i + 1 < len(words) else None
        if following is not None and following.startswith("--"):
            following = None
        yield _SHORT.get(key, key) + dot + rest, value if is_one_word else following


def _put(config: dict[str, Any], path: list[str], value: str | None) -> None:
    """Set a value at a dotted place, as vLLM's command line does."""
    place = config
    for part in path[:-1]:
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ValueError(f"--{_OPTION}.{'.'.join(path)}: {part} has a value already")
        place = inner
    parsed: Any = value
    with suppress(ValueError, RecursionError):
        parsed = json.loads(value or "")
    place[path[-1]] = parsed


def _yaml(text: str) -> Source:
    """Read vLLM's YAML file, or the configuration itself as YAML."""
    import yaml

    try:
        loaded = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ValueError(f"the configuration is neither JSON nor valid YAML: {problem}{place}") from None
    if not isinstance(loaded, dict):
        raise ValueError("the configuration is YAML without a key 'kv-transfer-config'")
    options = {str(key).replace("_", "-"): value for key, value in loaded.items()}
    if _OPTION not in options:
        return Source(_plain(loaded), {})
    value = options[_OPTION]
    config = _object(value) if isinstance(value, str) else _checked(value)
    return Source(_plain(config), {key: options[key] for key in _FLAGS if key in options})


def _plain(config: Any) -> Mapping[str, Any]:
    """Convert loaded YAML to JSON's types: all keys are text, and there are no dates."""
    return _checked(json.loads(json.dumps(config, default=str)))


# The router

_STOCK = (None, "", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
_AT_THE_TOP = ("engine_id", "kv_load_failure_policy")  # inherited by connectors; read at the top level only


class Router(Enum):
    """The router that a configuration puts between vLLM and the connectors."""

    KVOBS = auto()
    STOCK = auto()
    NONE = auto()


def router_of(config: Mapping[str, Any]) -> Router:
    """Return the configured router, without looking at the environment."""
    if config.get("kv_connector") != ROUTER:
        return Router.NONE
    module = config.get("kv_connector_module_path")
    if module in OURS:
        return Router.KVOBS
    return Router.STOCK if module in _STOCK else Router.NONE


def rewrite(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration changed to use kvobs; unchanged if it uses kvobs already."""
    old = copy.deepcopy(dict(config))
    router = router_of(config)
    if router is Router.KVOBS:
        return old
    head = {"kv_connector": ROUTER, "kv_connector_module_path": "kvobs"}
    new = head | {key: value for key, value in old.items() if key not in head}
    if router is Router.NONE:
        keys = [key for key in TransferConfig.model_fields if key in old and key not in _AT_THE_TOP]
        new[PATH] = {"connectors": [{key: old[key] for key in keys}]}
    _fill_in_names(new.get(PATH))
    return new


def _fill_in_names(extra: Any) -> None:
    """Add the connectors' names as kvobs chooses them, if they are valid names."""
    options = extra.get("kvobs", {}) if isinstance(extra, dict) else None
    if isinstance(options, dict):
        with suppress(ConfigError):  # a class name may be an invalid name
            named = {**options, "names": list(read_extra(extra).names)}
            read_extra({**extra, "kvobs": named})
            extra["kvobs"] = named
