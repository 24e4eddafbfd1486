"""Read the configurations that `kvobs check` is given.

A text is JSON, a shell's line or script, or YAML with engines anywhere in it: vLLM's own file, manifests, Helm values.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvobs.cli.check import launch
from kvobs.cli.check.flags import (
    ALONE,
    CONTAINER,
    DYNAMO_VLLM,
    ELSEWHERE,
    HOST_NETWORK,
    IMAGE,
    LAUNCHER,
    MEMORY,
    MORE,
    RAY,
    SHARED,
    SIZE,
    of_docker,
)
from kvobs.cli.check.launch import HAS_OPTION, NETWORK, OPTION, STARTS_VLLM, STOCK_IMAGE, Source
from kvobs.schema.config import PATH
from kvobs.vllm_api.versions import MULTIPROCESS

_FIRST_OF_YAML = re.compile(r"""-{3}(\s|$)|-\s|["']?[\w./-]+["']?\s*:(\s|$)|\{\{""")
_FIRST_OF_SHELL = re.compile(r"\[[\w:]+\]$|\{\s+\w|\[\[?\s+[-!$\w]")  # or of a unit of systemd
_IS_CONFIG = re.compile(r"""(?ms)^\s*(?:\{.*"kv_connector|kv[-_](?:connector|transfer[-_]config)["']?\s*:)""")
_OF_LMCACHE = (
    f"leave lmcacheConfig.enabled unset, and give vllmConfig.extraArgs a --{OPTION} that lists LMCacheConnectorV1 "
    "among its connectors: see 'vLLM production stack' in docs/deployment.md"
)
_MAKERS = ("LLMInferenceService", "LLMInferenceServiceConfig", "RayService", "RayCluster", "DynamoGraphDeployment")
"""Kinds whose controller, or what it starts, sets variables of its own."""
_IS_FLOW = re.compile(r"\s*\{\s*kv_connector:\s")  # of YAML, for another program than vLLM
_IN_AN_IMAGE = re.compile(r'"(?:apiVersion|image|repository|build|container|container_?[iI]mage|image_?[nN]ame)": ')
_KEYS = {"kv_connector", "kv_connector_module_path", "kv_role", PATH}
"""Each makes an object a configuration, which may lack the first."""


def read(argument: str) -> list[Source]:
    """Read the configurations that CONFIG names or is, at least one; each that can't be read has the reason."""
    sources = launch.attempt("", lambda: parse(_text(argument)))
    is_script = len(sources) > 1 and not any(source.place for source in sources)
    return [source._replace(place=f"command {n}") for n, source in enumerate(sources, 1)] if is_script else sources


def _text(argument: str) -> str:
    if argument == "-":
        return sys.stdin.read()
    is_text = argument.lstrip()[:1] in ("", *"{['\"`") or "\n" in argument
    if is_text or HAS_OPTION.search(argument) or STARTS_VLLM.search(argument):
        return argument
    try:
        return Path(argument).read_text("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: a null character in the name, or the text is not UTF-8
        problem = getattr(error, "strerror", None) or "is no file with UTF-8 text"
        raise ValueError(f"{argument[:200]}: {problem}") from None


def parse(text: str, place: str = "", environment: Mapping[str, str] = {}) -> list[Source]:
    """Return the configurations in a text, at a place within a file if given; raise ``ValueError`` if it has none."""
    text = text.removeprefix("\ufeff")
    first = next((line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")), "")
    if not first:
        raise ValueError("the configuration is empty")
    if _FIRST_OF_YAML.match(first):
        return _read_yaml(text, place, environment)
    if first[0] not in "{[" or _FIRST_OF_SHELL.match(first):
        if sources := list(launch.read_script(text, place, environment)):
            return sources
        if HAS_OPTION.search(text) or STARTS_VLLM.search(text):
            launch.require_known("the vllm line", text)
            kind = launch.NotKnownError if HAS_OPTION.search(text) else ValueError
            raise kind("the line has no --kv-transfer-config that can be read; if it has --config, check that file")
    config, _ = launch.read_json(text)
    is_document = isinstance(config, dict) and _KEYS.isdisjoint(config)
    sources = list(_engines(config, place, environment)) if is_document else []
    return sources or [launch.source_of(text, {}, environment, place)]


class _Loader(yaml.SafeLoader):
    """Notes the keys that are in one mapping more than once."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated = list[str]()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        self.repeated += [key for key, times in keys.items() if times > 1]
        return node


def _read_yaml(text: str, place: str, environment: Mapping[str, str]) -> list[Source]:
    """Read vLLM's YAML file, the configuration itself as YAML, or a file with engines somewhere in it."""
    documents = []
    try:
        loader = _Loader(text)
        while loader.check_data():  # type: ignore[no-untyped-call] # its stub has no type
            documents.append(loader.get_data())
        json.dumps(documents, default=str)  # an anchor within itself
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: also a date that there is not
        if "{{" in text:
            found = "the file is a template, whose values are not known here: give the output of `helm template`"
            raise launch.NotKnownError(found) from None
        sources = launch.attempt(place, launch.read_script, text, place, environment)  # a rule of make begins likewise
        if sources and not any(source.problem for source in sources):
            return sources
        raise ValueError(f"the configuration is neither JSON nor valid YAML: {' '.join(str(error).split())}") from None
    if documents and _IN_AN_IMAGE.search(json.dumps(documents, default=str)):
        environment = {**environment, ELSEWHERE: "1"}
    sources = [source for node in documents for source in _engines(node, place or _name_of(node), environment)]
    if not sources:
        raise ValueError("the YAML has neither a key 'kv-transfer-config' or 'kv_connector' nor a --kv-transfer-config")
    warnings = tuple(launch.repetition("YAML", key, "mapping") for key in loader.repeated)
    return [source._replace(warnings=warnings + source.warnings) for source in sources]


def _name_of(document: Any) -> str:
    """Return the kind and name of a Kubernetes object; empty for any other document."""
    about = document.get("metadata") if isinstance(document, dict) else None
    return f"{document.get('kind')} {about.get('name')}" if isinstance(about, dict) else ""


def _engines(node: Any, place: str, environment: Mapping[str, str]) -> Iterator[Source]:
    """Yield the configurations within a part of a document."""
    if isinstance(node, str):
        is_line = HAS_OPTION.search(node) and re.search(r"[=\s]", node.strip())
        if is_line or _IS_CONFIG.search(node):  # also a file in a ConfigMap, or the value of a patch
            yield from launch.attempt(place, parse, launch.substitute(node, {}), place, environment)
        elif _IS_FLOW.match(node):
            yield from launch.attempt(place, _read_yaml, launch.substitute(node, {}), place, environment)
    elif isinstance(node, list):
        words = [launch.substitute(str(word), {}) for word in node if isinstance(word, str | int | float)]
        if any(map(HAS_OPTION.match, words)):
            yield from launch.attempt(place, launch.read_words, words, place, environment)
        elif {DYNAMO_VLLM, "--connector"} <= {*words}:
            yield Source(place=place, unknown="Dynamo makes the configuration of --connector")
        else:
            for i, inner in enumerate(node):
                yield from _engines(inner, f"{place}[{i}]", environment)
    elif isinstance(node, dict):
        yield from _of_mapping(node, place, environment)


def _of_mapping(node: dict[Any, Any], place: str, environment: Mapping[str, str]) -> Iterator[Source]:
    options = {str(key).replace("_", "-"): value for key, value in node.items()}
    if f"--{OPTION}" in options and place.endswith("]"):
        problem = f"--{OPTION} has a colon behind it, which makes a mapping of it: vLLM's arguments are texts"
        yield Source(place=place, problem=f"{problem}; write '--{OPTION}=...', or the value as the next argument")
    elif not _KEYS.isdisjoint(node):
        yield from launch.attempt(place, launch.source_of, node, {}, environment, place)
    elif options.get(OPTION) is not None or options.get(SIZE) is not None:
        options |= {LAUNCHER: RAY} if RAY in place else {}
        yield from launch.attempt(place, launch.source_of, options.get(OPTION), options, environment, place)
    else:
        of_chart = {MULTIPROCESS: "/tmp"} if node.get("vllmConfig") else {}  # of the vLLM production stack
        environment = {**environment, **of_chart, **_variables(node)}
        if "image" in node and {"command", "args"} & node.keys() and node.get(NETWORK) != "host":
            environment[CONTAINER] = environment[ALONE] = "1"
        is_made = node.get("kind") in _MAKERS or node.keys() & {"envFrom", "env_file"}
        environment |= {MORE: "1"} if is_made else {}
        environment |= {HOST_NETWORK: "1"} if node.get(NETWORK) == "host" or node.get("hostNetwork") else {}
        image = str(node.get("image") or f"{node.get('repository')}:{node.get('tag')}".removesuffix(":None"))
        environment |= {IMAGE: image} if STOCK_IMAGE.match(image) else {}
        environment |= _limits(node, environment)
        match node:
            case {"lmcacheConfig": {"enabled": True}}:
                found = f"the chart makes a --{OPTION} of lmcacheConfig: LMCacheConnectorV1 alone, behind any other"
                is_second = HAS_OPTION.search(json.dumps(node.get("vllmConfig"), default=str))
                problem = f"{found}: vLLM reads the last one" if is_second else ""
                yield Source(place=place, problem=problem, unknown="" if is_second else found, fix=_OF_LMCACHE)
        if _list(node.get("command")) and _list(node.get("args")):
            node = {**node, "command": None, "args": [*node["command"], *node["args"]]}
        for key, value in node.items():
            if key != "annotations":  # kubectl keeps a copy of the manifest there
                yield from _engines(value, f"{place}.{key}".lstrip("."), environment)


def _limits(node: Mapping[Any, Any], known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the limits of memory that a container or a service of compose has, and those of a pod's volumes."""
    for each in (node, *_list(node.get("volumes")), *_list(node.get("volumeMounts"))):
        match each:
            case {"resources": {"limits": {"memory": str(limit)}}}:
                yield MEMORY, limit
            case {"shm_size": size}:
                yield SHARED, of_docker(size)
            case {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": limit}}:
                yield f"{SHARED} of {name}", str(limit)
            case {"name": name, "mountPath": "/dev/shm"}:
                yield SHARED, known.get(f"{SHARED} of {name}", "")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _variables(node: Mapping[Any, Any]) -> dict[str, str]:
    """Return the variables that a container, a service of compose, or Ray's runtime environment sets."""
    out: dict[Any, Any] = {NETWORK: "host"} if node.get(NETWORK) == "host" else {}
    for given in (value for key, value in node.items() if re.search("env", str(key), re.IGNORECASE)):  # extraEnvVars
        if isinstance(given, dict):
            out |= inner if isinstance(inner := given.get("env_vars"), dict) else given  # of Ray's runtime_env
        for each in _list(given):
            if isinstance(each, dict) and each.get("name"):
                out[each["name"]] = each.get("value", "$(valueFrom)")
            elif isinstance(each, str) and "=" in each:
                out[each.partition("=")[0]] = each.partition("=")[2]
    return {str(name): launch.substitute(str(value), {}) for name, value in out.items()}
