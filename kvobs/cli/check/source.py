"""Read the configurations that `kvobs check` is given, and change one to use kvobs.

A text is JSON, a shell's line or script, or YAML with engines anywhere in it: vLLM's own file, manifests, Helm values.
Other options of vLLM beside a configuration, and the variables of its engine, are read too.
"""

import ast
import copy
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from kvobs.children.known import OURS, PD_ROUTER, ROUTER
from kvobs.schema.config import PATH, ConfigError
from kvobs.schema.config import read as read_extra
from kvobs.schema.findings import Finding, show
from kvobs.vllm_api.versions import TransferConfig

LAUNCHER, RAY, DYNAMO_VLLM = "launcher", "engine_kwargs", "dynamo.vllm"
"""The key among the flags that says who starts the engine, and its values."""
_OPTION, _SIZE = "kv-transfer-config", "kv-offloading-size"
_SHORT = {"asc": "api-server-count", "dp": "data-parallel-size", "dpl": "data-parallel-size-local"}
_HAS_OPTION = re.compile(r"(?:^|[\s\"'=(])--kv[-_](?:transfer[-_]config|offloading[-_]size)\b")
_STARTS_VLLM = re.compile(rf"\bvllm\s+serve\b|\bvllm\.entrypoints\b|\b{re.escape(DYNAMO_VLLM)}\b")
_FIRST_OF_YAML = re.compile(r"""-{3}(\s|$)|-\s|["']?[\w./-]+["']?\s*:(\s|$)""")
_IS_CONFIG = re.compile(
    r"""^\s*(?:\{.*"kv_connector"|kv[-_](?:connector|transfer[-_]config)["']?\s*:)""", re.DOTALL | re.MULTILINE
)
_TEMPLATE = "the file is a template: give the output of `helm template`, or the values"
_LMCACHE = ('--kv-transfer-config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',)
"""The arguments that the vLLM production stack's chart appends where LMCache is enabled."""


class Source(NamedTuple):
    """One engine's configuration; vLLM's options beside it, by name without dashes, and the variables set for it.

    ``flags`` is empty if it stands alone; ``place`` is where it is in a file of several.
    """

    config: Mapping[str, Any]
    flags: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    place: str = ""
    warnings: tuple[Finding, ...] = ()


def read(argument: str) -> list[Source]:
    """Read the configurations that CONFIG names or is, at least one; raise ``ValueError`` with the reason otherwise."""
    sources = parse(_text(argument))
    is_script = len(sources) > 1 and not any(source.place for source in sources)
    return [source._replace(place=f"command {n}") for n, source in enumerate(sources, 1)] if is_script else sources


def _text(argument: str) -> str:
    if argument == "-":
        return sys.stdin.read()
    if argument.lstrip()[:1] in ("", *"{['\"`") or _HAS_OPTION.search(argument):
        return argument
    try:
        if ("\n" in argument or _STARTS_VLLM.search(argument)) and not Path(argument).exists():
            return argument
        data = Path(argument).read_bytes()
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not a name of a file"
        raise ValueError(f"{argument[:200]}: {problem}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{argument} is not UTF-8 text") from None


def parse(text: str, place: str = "", environment: Mapping[str, str] = {}) -> list[Source]:
    """Return the configurations in a text, at a place within a file if given; raise ``ValueError`` as ``read`` does."""
    text = text.removeprefix("\ufeff")
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    if not first:
        raise ValueError("the configuration is empty")
    if _FIRST_OF_YAML.match(first) or first.startswith("{{"):
        return _of_yaml(text, place, environment)
    if first[0] not in "{[" or re.fullmatch(r"\[[\w:]+\]", first):  # as a unit of systemd begins
        if sources := list(_of_script(text, place, environment)):
            return sources
        if _STARTS_VLLM.search(text):
            found = "the vllm line has no --kv-transfer-config, so that vLLM builds no connector"
            raise ValueError(f"{found}; if it has --config, check the file named there")
    twice: list[str] = []
    config = _object(text, twice)
    sources = [] if "kv_connector" in config else list(_engines(config, place, environment))
    return sources or [_source(config, {}, environment, place, twice)]


def _object(text: str, twice: list[str]) -> Mapping[str, Any]:
    """Return an object from JSON; add the keys that are in one object more than once."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return dict(pairs)

    try:
        config = json.loads(text, object_pairs_hook=unique)
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


def _source(
    given: Any, flags: Mapping[str, Any], environment: Mapping[str, str], place: str, twice: Sequence[str] = ()
) -> Source:
    """Return what vLLM makes of an option's value, JSON or an object, and of the other options."""
    keys = [*twice]
    if isinstance(given, str) and given.lstrip().startswith(("$", "`", "{{")):
        raise ValueError(f"--{_OPTION} is {show(given)}, which a shell or a template replaces: give its value")
    config = {} if given is None else _object(given, keys) if isinstance(given, str) else _checked(given)
    text = "found the key {!r} twice in one object: the first has no effect"
    warnings = [Finding(f"--{_OPTION}", text.format(key), fix="remove one of them") for key in keys]
    if (size := flags.get(_SIZE)) is not None:
        name = "LMCacheMPConnector"
        extra = dict(config.get(PATH) or {})
        if flags.get("kv-offloading-backend") != "lmcache":
            is_simple = environment.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("0", "")
            name = "SimpleCPUOffloadConnector" if is_simple else "OffloadingConnector"
            with suppress(TypeError, ValueError, OverflowError):
                extra["cpu_bytes_to_use"] = int(float(size) * (1 << 30))
        config = {**config, "kv_connector": name, "kv_role": "kv_both", PATH: extra}
        text = f"vLLM makes {name} of it, in the place of any kv_connector of --{_OPTION}"
        warnings.append(Finding(f"--{_SIZE}", text, fix="remove it, and use a configuration, as --rewrite prints it"))
    return Source(json.loads(json.dumps(config, default=str)), flags, environment, place, tuple(warnings))


# Lines and scripts

_SEPARATORS = ";&|()\n"
_ASSIGNMENT = re.compile(r"(?:Environment=)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\}|\((\w+)\))")


def _of_script(text: str, place: str, environment: Mapping[str, str]) -> Iterator[Source]:
    """Read a shell's line or script, or a unit of systemd."""
    known, exported = dict(environment), dict(environment)
    for command in _commands(text):
        words = _expanded(command, known)
        given = {match[1]: match[2] for word in words if (match := _ASSIGNMENT.fullmatch(word))}
        known |= given
        if words and (words[0] in ("export", "ENV") or words[0].startswith("Environment=")):
            exported |= given | {word: known[word] for word in words if word in known}
        if any(map(_HAS_OPTION.match, words)):
            yield _of_words(words, place, exported | given)
        for word in words:  # a line for another shell: bash -c, ssh
            if _HAS_OPTION.search(word) and _STARTS_VLLM.search(word) and " " in word:
                yield from _of_script(word, place, exported | given)


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command."""
    text = re.sub(r"\$\(\(.*?\)\)", "$0", re.sub(r"\\\r?\n", " ", text)).replace(
        "\n", "\n\n"
    )  # a comment ends with one
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        for is_end, words in groupby(lexer, lambda word: bool(word) and set(word) <= set(_SEPARATORS)):
            if not is_end:
                yield list(words)
    except ValueError as error:
        raise ValueError(f"the line has a quote that is not closed: {error}") from None


def _expanded(words: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Return words with the known variables replaced; one that is a variable with options becomes several words."""
    out: list[str] = []
    for word in words:
        value = _VARIABLE.sub(lambda match: known.get(next(filter(None, match.groups())), match[0]), word)
        has_options = word[0:1] == "$" and value.startswith("--")
        out += (shlex.split(value) if "'" in value else value.split()) if has_options else [value]
    return out


def _of_words(words: Sequence[str], place: str, environment: Mapping[str, str]) -> Source:
    """Read a command's words: the option as JSON, or its parts by dotted names."""
    given: list[Any] = []
    parts: dict[str, Any] = {}
    flags: dict[str, Any] = {LAUNCHER: DYNAMO_VLLM} if DYNAMO_VLLM in words else {}
    for name, value in _options(words):
        key, _, rest = name.partition(".")
        if key == _OPTION and value is None:
            raise ValueError(f"--{_OPTION} has no value")
        if key == _OPTION and rest:
            _put(parts, rest.split("."), value)
        elif key == _OPTION:
            given.append(value)
        if value is None or not re.search(r"\$|\{\{", value):
            flags[key] = True if value is None else value
    given += [parts] if parts else []  # vLLM reads them last, wherever they are
    if not given and _SIZE not in flags:
        raise ValueError(f"the line has no --{_OPTION} that can be read")
    source = _source(given[-1] if given else None, flags, environment, place)
    if len(given) > 1:
        found = f"found {len(given)} of this option (dotted names count as one): only the last has an effect"
        more = Finding(f"--{_OPTION}", found, fix="keep one, with all connectors")
        source = source._replace(warnings=(more, *source.warnings))
    return source


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
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
    *outer, last = path
    for part in outer:
        config = config.setdefault(part, {})
        if not isinstance(config, dict):
            raise ValueError(f"--{_OPTION}.{'.'.join(path)}: {part} has a value already")
    config[last] = value
    with suppress(ValueError, RecursionError):
        config[last] = json.loads(value or "")


# YAML


def _of_yaml(text: str, place: str, environment: Mapping[str, str]) -> list[Source]:
    """Read vLLM's YAML file, the configuration itself as YAML, or a file with engines somewhere in it."""
    import yaml

    try:
        documents = list(yaml.safe_load_all(text))
        json.dumps(documents, default=str)  # an anchor within itself
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: also a date that there is not
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or type(error).__name__
        reason = _TEMPLATE if "{{" in text else f"the configuration is neither JSON nor valid YAML: {problem}{where}"
        raise ValueError(reason) from None
    sources = [
        source for document in documents for source in _engines(document, place or _name_of(document), environment)
    ]
    used = [source.config for source in sources if source.flags]
    sources = [source for source in sources if source.flags or source.config not in used]  # not a variable's value too
    if not sources:
        raise ValueError("the YAML has neither a key 'kv-transfer-config' or 'kv_connector' nor a --kv-transfer-config")
    return sources


def _name_of(document: Any) -> str:
    """Return the kind and name of a Kubernetes object; empty for any other document."""
    about = document.get("metadata") if isinstance(document, dict) else None
    return f"{document.get('kind')} {about.get('name')}" if isinstance(about, dict) else ""


def _engines(node: Any, place: str, environment: Mapping[str, str], tail: Sequence[str] = ()) -> Iterator[Source]:
    """Yield the configurations within a part of a document; ``tail``: arguments that a chart appends."""
    if isinstance(node, str):
        is_line = _HAS_OPTION.search(node) and re.search(r"[=\s]", node.strip())
        # A line, a file in a ConfigMap, or the value of a patch.
        yield from parse(node, place, environment) if is_line or _IS_CONFIG.search(node) else ()
    elif isinstance(node, list):
        words = _expanded([str(word) for word in node if isinstance(word, str | int | float)], environment)
        if any(map(_HAS_OPTION.match, words)):
            yield _of_words([*words, *tail], place, environment)
        else:
            for i, inner in enumerate(node):
                yield from _engines(inner, f"{place}[{i}]", environment, tail)
    elif isinstance(node, dict):
        yield from _of_mapping(node, place, environment, tail)


def _of_mapping(
    node: dict[Any, Any], place: str, environment: Mapping[str, str], tail: Sequence[str]
) -> Iterator[Source]:
    options = {str(key).replace("_", "-"): value for key, value in node.items()}
    if "kv_connector" in node:
        yield _source(node, {}, environment, place)
    elif options.get(_OPTION) is not None or options.get(_SIZE) is not None:
        yield _source(options.get(_OPTION), options | ({LAUNCHER: RAY} if RAY in place else {}), environment, place)
    else:
        lmcache = node.get("lmcacheConfig")
        tail = _LMCACHE if isinstance(lmcache, dict) and lmcache.get("enabled") is True else tail
        environment = {**environment, **_variables(node)}
        if isinstance(node.get("command"), list) and isinstance(node.get("args"), list):
            node = {**node, "command": None, "args": [*node["command"], *node["args"]]}
        for key, value in node.items():
            inner = None if key == "annotations" else value  # kubectl keeps a copy of the manifest there
            yield from _engines(inner, f"{place}.{key}".lstrip("."), environment, tail)


def _variables(node: Mapping[Any, Any]) -> dict[str, str]:
    """Return the variables that a container, a service of compose, or Ray's runtime environment sets."""
    out: dict[str, Any] = {}
    runtime = node.get("runtime_env")
    for given in (
        *map(node.get, ("env", "envs", "environment")),
        runtime.get("env_vars") if isinstance(runtime, dict) else None,
    ):
        listed = given if isinstance(given, list) else []
        out |= given if isinstance(given, dict) else {}
        out |= dict(each.split("=", 1) for each in listed if isinstance(each, str) and "=" in each)
        out |= {str(each.get("name")): each["value"] for each in listed if isinstance(each, dict) and "value" in each}
    return {str(name): str(value) for name, value in out.items()}


# The router

_STOCK = (None, "", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector")
_AT_THE_TOP = ("engine_id", "kv_load_failure_policy")  # inherited by connectors; read at the top level only


class Router(Enum):
    """The router that a configuration puts between vLLM and the connectors."""

    KVOBS = auto()
    STOCK = auto()
    NONE = auto()
    DYNAMO = auto()


def router_of(config: Mapping[str, Any]) -> Router:
    """Return the configured router, without looking at the environment."""
    module = config.get("kv_connector_module_path")
    if config.get("kv_connector") == PD_ROUTER and str(module).startswith("kvbm."):
        return Router.DYNAMO
    if config.get("kv_connector") != ROUTER:
        return Router.NONE
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
