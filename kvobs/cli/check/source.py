"""Read the configurations that `kvobs check` is given, and change one to use kvobs.

A text is JSON, a shell's line or script, or YAML with engines anywhere in it: vLLM's own file, manifests, Helm values.
Other options of vLLM beside a configuration, and the variables of its engine, are read too.
"""

import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any

from kvobs.children.known import OURS, PD_ROUTER, ROUTER
from kvobs.cli.check import launch
from kvobs.cli.check.launch import DYNAMO_VLLM, HAS_OPTION, NETWORK, OPTION, RAY, STARTS_VLLM, Source, tried
from kvobs.schema.config import PATH, ConfigError
from kvobs.schema.config import read as read_extra
from kvobs.schema.findings import Finding, show
from kvobs.vllm_api.versions import MULTIPROCESS, TransferConfig

_FIRST_OF_YAML = re.compile(r"""-{3}(\s|$)|-\s|["']?[\w./-]+["']?\s*:(\s|$)""")
_IS_CONFIG = re.compile(r"""(?ms)^\s*(?:\{.*"kv_connector|kv[-_](?:connector|transfer[-_]config)["']?\s*:)""")
_KEYS = {"kv_connector", "kv_connector_module_path", "kv_role", PATH}
"""Each makes an object a configuration, which may lack the first."""
_TEMPLATE = "the file is a template: give the output of `helm template`, or the values"
_LMCACHE = ('--kv-transfer-config={"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}',)
"""The arguments that the vLLM production stack's chart appends where LMCache is enabled."""


def read(argument: str) -> list[Source]:
    """Read the configurations that CONFIG names or is, at least one; raise ``ValueError`` if none can be read."""
    sources = parse(_text(argument))
    if len(sources) == 1 and sources[0].problem:
        raise ValueError(": ".join(filter(None, (sources[0].place, sources[0].problem))))
    is_script = len(sources) > 1 and not any(source.place for source in sources)
    return [source._replace(place=f"command {n}") for n, source in enumerate(sources, 1)] if is_script else sources


def _text(argument: str) -> str:
    if argument == "-":
        return sys.stdin.read()
    if argument.lstrip()[:1] in ("", *"{['\"`") or HAS_OPTION.search(argument):
        return argument
    try:
        if ("\n" in argument or STARTS_VLLM.search(argument)) and not Path(argument).exists():
            return argument
        return Path(argument).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{argument} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else "is not a name of a file"
        raise ValueError(f"{argument[:200]}: {problem}") from None


def parse(text: str, place: str = "", environment: Mapping[str, str] = {}) -> list[Source]:
    """Return the configurations in a text, at a place within a file if given; raise ``ValueError`` if it has none."""
    text = text.removeprefix("\ufeff")
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    if not first:
        raise ValueError("the configuration is empty")
    if _FIRST_OF_YAML.match(first) or first.startswith("{{"):
        return _of_yaml(text, place, environment)
    if first[0] not in "{[" or re.fullmatch(r"\[[\w:]+\]", first):  # as a unit of systemd begins
        if sources := list(launch.of_script(text, place, environment)):
            return sources
        if STARTS_VLLM.search(text):
            if DYNAMO_VLLM in text and re.search(r"\s--connector\b", text):
                raise ValueError("Dynamo makes the configuration of --connector: give one as --kv-transfer-config")
            found = "the vllm line has no --kv-transfer-config, so that vLLM builds no connector"
            raise ValueError(f"{found}; if it has --config, check the file named there")
    twice: list[str] = []
    config = launch.read_object(text, twice)
    sources = list(_engines(config, place, environment)) if _KEYS.isdisjoint(config) else []
    return sources or [launch.source_of(config, {}, environment, place, twice)]


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
    sources = [source for node in documents for source in _engines(node, place or _name_of(node), environment)]
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
        is_line = HAS_OPTION.search(node) and re.search(r"[=\s]", node.strip())
        node = launch.filled(node, environment) if node.lstrip().startswith("{") else node
        # A line, a file in a ConfigMap, or the value of a patch.
        yield from tried(place, parse, node, place, environment) if is_line or _IS_CONFIG.search(node) else ()
    elif isinstance(node, list):
        words = launch.expanded([str(word) for word in node if isinstance(word, str | int | float)], environment)
        if any(map(HAS_OPTION.match, words)):
            yield from tried(place, launch.of_words, [*words, *tail], place, environment)
        else:
            for i, inner in enumerate(node):
                yield from _engines(inner, f"{place}[{i}]", environment, tail)
    elif isinstance(node, dict):
        yield from _of_mapping(node, place, environment, tail)


def _of_mapping(node: Any, place: str, environment: Mapping[str, str], tail: Sequence[str]) -> Iterator[Source]:
    options = {str(key).replace("_", "-"): value for key, value in node.items()}
    if not _KEYS.isdisjoint(node):
        yield from tried(place, launch.source_of, node, {}, environment, place)
    elif options.get(OPTION) is not None or options.get(launch.SIZE) is not None:
        flags = options | ({launch.LAUNCHER: RAY} if RAY in place else {})
        yield from tried(place, launch.source_of, options.get(OPTION), flags, environment, place)
    else:
        lmcache = node.get("lmcacheConfig")
        has_lmcache = isinstance(lmcache, dict) and lmcache.get("enabled") is True
        tail = _LMCACHE if has_lmcache else tail
        of_chart = {MULTIPROCESS: "/tmp"} if node.get("vllmConfig") else {}  # of the vLLM production stack
        environment = {**environment, **of_chart, **_variables(node)}
        if isinstance(node.get("command"), list) and isinstance(node.get("args"), list):
            node = {**node, "command": None, "args": [*node["command"], *node["args"]]}
        sources: list[Source] = []
        for key, value in node.items():
            inner = None if key == "annotations" else value  # kubectl keeps a copy of the manifest there
            sources += _engines(inner, f"{place}.{key}".lstrip("."), environment, tail)
        if has_lmcache and not sources:
            sources = [launch.of_words(tail, f"{place}.lmcacheConfig, which adds LMCacheConnectorV1", environment)]
        yield from sources


def _variables(node: Mapping[Any, Any]) -> dict[str, str]:
    """Return the variables that a container, a service of compose, or Ray's runtime environment sets."""
    runtime, out = node.get("runtime_env"), dict[str, Any]()
    lists = [value for key, value in node.items() if re.search("env", str(key), re.IGNORECASE)]  # also extraEnvVars
    for given in (*lists, runtime.get("env_vars") if isinstance(runtime, dict) else None):
        listed = given if isinstance(given, list) else []
        out |= given if isinstance(given, dict) else {}
        out |= dict(each.split("=", 1) for each in listed if isinstance(each, str) and "=" in each)
        out |= {str(each.get("name")): each["value"] for each in listed if isinstance(each, dict) and "value" in each}
    out |= {NETWORK: "host"} if node.get(NETWORK) == "host" else {}
    return {str(name): launch.filled(str(value), {}) for name, value in out.items()}


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


def corrected(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return the configuration with slips in the name of kvobs's router corrected, and the mistakes that they are."""
    name, module, extra = config.get("kv_connector"), config.get("kv_connector_module_path"), config.get(PATH)
    has_list = isinstance(extra, Mapping) and "connectors" in extra
    if name != ROUTER and (module in OURS or (not name and has_list)):
        key, right = "kv_connector", ROUTER
    elif name == ROUTER and module not in OURS and re.sub("[^a-z]", "", str(module).lower()).startswith("kvob"):
        key, right = "kv_connector_module_path", OURS[0]
    else:
        return dict(config), []
    found = f"found {show(config[key])}" if config.get(key) else "is missing: vLLM would run without a connector"
    return {**config, key: right}, [Finding(key, found, repr(right), f"use {right!r}")]


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
