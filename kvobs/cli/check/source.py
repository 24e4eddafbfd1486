"""Read the configurations that `kvobs check` is given.

A text is JSON, a shell's line or script, or YAML with engines anywhere in it: vLLM's own file, manifests, Helm values.
"""

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from kvobs.cli.check import flags as marks
from kvobs.cli.check import launch
from kvobs.cli.check.flags import DYNAMO_VLLM, LAUNCHER, RAY, SIZE, UnreadableError, of_docker
from kvobs.cli.check.launch import HAS_OPTION, NETWORK, OPTION, STARTS_VLLM, STOCK_IMAGE, Source
from kvobs.schema import kinds
from kvobs.schema.config import PATH
from kvobs.schema.findings import Kind, Level
from kvobs.vllm_api.versions import MULTIPROCESS, TransferConfig

_FIRST_OF_YAML = re.compile(r"""-{3}(\s|$)|-\s|["']?[\w./-]+["']?\s*:(\s|$)|\{\{""")
_FIRST_OF_SHELL = re.compile(r"\[[\w:]+\]$|\{\s+\w|\[\[?\s+[-!$\w]")  # or of a unit of systemd
_FIRST_OF_PYTHON = re.compile(r"#!.*python|(?:from [\w.]+ )?import [\w.]+|\"\"\"|'''|def \w+\(|class \w+|@\w+")
_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_IS_CONFIG = re.compile(r"""(?ms)^\s*(?:\{.*"kv_connector|kv[-_](?:connector|transfer[-_]config)["']?\s*:)""")
_IS_FLOW = re.compile(r"\s*\{\s*kv_connector:\s")  # of YAML, for another program than vLLM
_IN_AN_IMAGE = re.compile(
    r"(?m)\b(?:docker|podman|nerdctl|apptainer|singularity|enroot|kubectl|helm)\b|--container(?:-image)?\b|^#SBATCH\b"
    r"""|\b(?:apiVersion|image|repository|build|container|container_?[iI]mage|image_?[nN]ame)["']?\s*:(?=["'{\s]|$)"""
)
_BARE = re.compile(r"--kv[-_]transfer[-_]config[ =](?=\{)")
_KEYS = {"kv_connector", "kv_connector_module_path", "kv_role", PATH}
"""Each makes an object a configuration, which may lack the first."""
_SHELL_KEYS = {"run", "script", "before_script", "commands"}  # of CI
_MAKES = re.compile(r'"([\w-]*(?:lmcache|nixl|mooncake|kv_?(?:cache_?off|transfer|connector))[\w-]*)": ', re.IGNORECASE)
_SET_ELSEWHERE = re.compile(r"\$\{?\(?\w*(?:KV|TRANSFER|CONNECTOR|EXTRA|ARGS)\w*")
_VALUE_FROM = "$(valueFrom)"
_MAKERS = ("LLMInferenceService", "LLMInferenceServiceConfig", "RayService", "RayCluster", "DynamoGraphDeployment")
"""Kinds whose controller, or what it starts, sets further variables."""


def read(argument: str) -> list[Source]:
    """Read the configurations that CONFIG names or is, at least one; each that can't be read has the reason."""
    sources = launch.attempt("", lambda: parse(_text(argument)))
    is_script = len(sources) > 1 and not any(source.location for source in sources)
    return [source._replace(location=f"command {n}") for n, source in enumerate(sources, 1)] if is_script else sources


def _text(argument: str) -> str:
    is_text = argument.lstrip()[:1] in ("", *"{['\"`") or "\n" in argument
    if is_text or HAS_OPTION.search(argument) or STARTS_VLLM.search(argument):
        return argument
    try:
        if argument == "-":
            return sys.stdin.read() if sys.stdin else ""  # it may be closed
        return Path(argument).read_text("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: a null character in the name, or the text is not UTF-8
        problem = getattr(error, "strerror", None) or "is no file with UTF-8 text"
        raise UnreadableError(kinds.FILE, file=argument[:200], problem=problem) from None


def parse(text: str, location: str = "", environment: Mapping[str, str] = {}) -> list[Source]:
    """Return the configurations in a text, at a location within a file if given; ``UnreadableError`` if it has none."""
    is_folded, text = isinstance(text, _Folded), text.removeprefix("\ufeff")
    environment = {**environment, **({marks.ELSEWHERE: "1"} if _IN_AN_IMAGE.search(text) else {})}
    lines = (line for line in map(str.strip, text.splitlines()) if line and not re.match(r"#(?!!)", line))
    first = next(lines, "")
    if not first:
        raise UnreadableError(kinds.EMPTY)
    if _FIRST_OF_PYTHON.match(first):
        raise UnreadableError(kinds.PYTHON)
    first = next(lines, first) if first.startswith("#!") else first
    if blocks := [] if first[0] in "{[" else [block for block in _FENCED.findall(text) if _has_any(block)]:
        return [source for block in blocks for source in launch.attempt(location, parse, block, location, environment)]
    if _FIRST_OF_YAML.match(first):
        return _read_yaml(text, location, environment)
    if first[0] not in "{[" or _FIRST_OF_SHELL.match(first):
        if sources := list(launch.read_script(text, location, environment, is_folded=is_folded)):
            return sources
        if HAS_OPTION.search(text):
            raise UnreadableError(kinds.FORM)
        if STARTS_VLLM.search(text):
            raise UnreadableError(kinds.DYNAMO_LINE if DYNAMO_VLLM in text else kinds.NONE_IN_LINE)
    config, _ = launch.read_json(text)
    if (
        isinstance(config, dict)
        and _KEYS.isdisjoint(config)
        and (engines := _found_in([config], location, environment))
    ):
        return engines
    return [launch.source_of(text, {}, environment, location)]


def _has_any(text: str) -> bool:
    return bool(HAS_OPTION.search(text) or _IS_CONFIG.search(text))


class _Folded(str):
    """A text of YAML's ``>``: each break of a line in it was before or behind a line that is indented more."""

    __slots__ = ()


class _Loader(yaml.SafeLoader):
    """Notes the keys that are in one mapping more than once, and which texts are folded."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated = list[str]()

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        self.repeated += [key for key, times in keys.items() if times > 1]
        return node

    def construct_yaml_str(self, node: Any) -> Any:
        text = super().construct_yaml_str(node)
        return _Folded(text) if node.style == ">" else text


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_yaml_str)


def _read_yaml(text: str, location: str, environment: Mapping[str, str]) -> list[Source]:
    """Read vLLM's YAML file, the configuration itself as YAML, or a file with engines somewhere in it."""
    documents = []
    try:
        loader = _Loader(text)
        while loader.check_data():  # type: ignore[no-untyped-call] # its stub has no type
            documents.append(loader.get_data())
        dumped = json.dumps(documents, default=str)  # an anchor within itself
    except Exception as error:  # whatever PyYAML raises, such as an IndexError of `!!int` without a number
        if "{{" in text or "{%" in text:
            raise UnreadableError(kinds.TEMPLATE) from None
        sources = launch.attempt(
            location, launch.read_script, text, location, environment
        )  # a rule of make begins likewise
        found = {finding.kind for source in sources for finding in source.findings}
        if sources and not any(kind.level is Level.MISTAKE or kind is kinds.QUOTE_IN_SCRIPT for kind in found):
            return sources
        if not re.search(r"kv[-_](?:transfer|connector)", text):
            raise UnreadableError(kinds.NOTHING) from None
        raise UnreadableError(kinds.YAML, error=" ".join(str(error).split())) from None
    sources = _found_in(documents, location, environment)
    if not sources:
        if made := _MAKES.search(dumped):
            raise UnreadableError(kinds.CHART, key=made[1])
        if elsewhere := _SET_ELSEWHERE.search(dumped):
            raise UnreadableError(kinds.SET_ELSEWHERE, found=elsewhere[0])
        raise UnreadableError(kinds.NONE_IN_YAML)
    twice = tuple(kinds.KEY_TWICE.at("YAML", key=key, where="mapping") for key in loader.repeated)
    return [source._replace(findings=twice + source.findings) for source in sources]


def _found_in(documents: list[Any], location: str, environment: Mapping[str, str]) -> list[Source]:
    """Return the engines in a file's documents; of objects of Kubernetes without one, that it is so."""
    dumped = json.dumps(documents, default=str)
    sources = [source for node in documents for source in _engines(node, location or _name_of(node), environment)]
    if not sources and '"apiVersion": ' in dumped and not (_MAKES.search(dumped) or _SET_ELSEWHERE.search(dumped)):
        raise UnreadableError(kinds.NO_ENGINE_HERE)
    return sources


def _name_of(document: Any) -> str:
    """Return the kind and name of a Kubernetes object; empty for any other document."""
    about = document.get("metadata") if isinstance(document, dict) else None
    return f"{document.get('kind')} {about.get('name')}" if isinstance(about, dict) else ""


def _engines(node: Any, location: str, environment: Mapping[str, str], *, in_shell: bool = False) -> Iterator[Source]:
    """Yield the configurations within a part of a document; ``in_shell``: a text is the script of a shell."""
    if isinstance(node, str):
        text: str = _expanded(node, environment)
        if isinstance(node, _Folded):
            text = (
                _Folded(text) if in_shell or location.rpartition(".")[2] in _SHELL_KEYS else re.sub(r"\s+", " ", text)
            )
        if (bare := _BARE.search(text)) and not in_shell and "\n" not in text.strip():
            with suppress(ValueError):  # a program that splits at white space takes JSON without quotes around it
                end = json.JSONDecoder().raw_decode(text, bare.end())[1]
                text = f"{text[: bare.end()]}{shlex.quote(text[bare.end() : end])}{text[end:]}"
        is_line = HAS_OPTION.search(text) and re.search(r"[=\s]", text.strip())
        if is_line or _IS_CONFIG.search(text):  # also a file in a ConfigMap, or the value of a patch
            yield from launch.attempt(location, parse, text, location, environment)
        elif _IS_FLOW.match(text):
            yield from launch.attempt(location, _read_yaml, text, location, environment)
    elif isinstance(node, list):
        words = [_expanded(str(word), environment) for word in node if isinstance(word, str | int | float)]
        if any(map(HAS_OPTION.match, words)) or {DYNAMO_VLLM, "--connector"} <= {*words}:
            yield from launch.attempt(location, launch.read_words, words, location, environment)
        else:
            is_script = any(re.fullmatch(r"-\w*c", word) for word in words[:-1])
            for i, inner in enumerate(node):
                yield from _engines(inner, f"{location}[{i}]", environment, in_shell=is_script)
    elif isinstance(node, dict):
        yield from _of_mapping(node, location, environment)


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """Return a text with defaults instead of variables, and with the container's values where Kubernetes expands."""
    text = re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), text)
    return launch.substitute(text.replace("$$", "$"), {})  # what compose and Kubernetes write for one


def _of_mapping(node: dict[Any, Any], location: str, environment: Mapping[str, str]) -> Iterator[Source]:
    options = {str(key).replace("_", "-"): value for key, value in node.items()}
    if f"--{OPTION}" in options and location.endswith("]"):
        yield _unreadable(location, kinds.COLON)
    elif _is_config(node):
        yield from launch.attempt(location, launch.source_of, node, {}, environment, location)
    elif options.get(OPTION) not in (None, "") or options.get(SIZE) not in (None, ""):
        yield from _of_options(options, location, environment)
    else:
        environment = {**environment, **_about(node, environment)}
        match node:
            case {"lmcacheConfig": {"enabled": True}}:
                is_second = HAS_OPTION.search(json.dumps(node.get("vllmConfig"), default=str))
                yield _unreadable(location, kinds.LMCACHE_CONFIG if is_second else kinds.LMCACHE_CHART)
        if _list(node.get("command")) and _list(node.get("args")):
            node = {**node, "command": None, "args": [*node["command"], *node["args"]]}
        used = set(re.findall(r"\$[({]?(\w+)", json.dumps([node.get("command"), node.get("args")], default=str)))
        for key, value in node.items():
            where = f"{location}.{key}".lstrip(".")
            if key == "kvCacheOffloading" and value:
                yield _unreadable(where, kinds.KSERVE)
            elif key in ("env", "environment") and isinstance(value, dict | list):
                # What a command of this container uses is looked at there.
                others = {name: each for name, each in _variables(value).items() if name not in used}
                yield from _engines(others, where, environment)
            elif key != "annotations":  # kubectl keeps a copy of the manifest there
                yield from _engines(value, where, environment)


def _of_options(options: Mapping[str, Any], location: str, environment: Mapping[str, str]) -> Iterator[Source]:
    """Yield the configuration among vLLM's options; of the others those that are known."""
    options = {key: each for key, each in options.items() if key == OPTION or not launch.UNKNOWN.search(str(each))}
    options |= {LAUNCHER: RAY} if RAY in location else {}
    if OPTION in options or SIZE in options:
        yield from launch.attempt(location, launch.source_of, options.get(OPTION), options, environment, location)
    else:
        yield _unreadable(location, kinds.SIZE_VALUE)


def _unreadable(location: str, kind: Kind) -> Source:
    return Source(location=location, findings=(kind.at("CONFIG"),))


def _is_config(node: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is a configuration: in a mapping of defaults vLLM does not know most keys."""
    foreign = [key for key in node if key not in TransferConfig.model_fields and not str(key).startswith("kv")]
    return not _KEYS.isdisjoint(node) and 2 * len(foreign) < len(node)


def _about(node: Mapping[Any, Any], known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a container, or what is around it, sets; and what else is known of the engine in it."""
    is_host = node.get(NETWORK) == "host"
    image = node.get("image") or f"{node.get('repository')}:{node.get('tag')}".removesuffix(":None")
    is_container = "image" in node and bool({"command", "args"} & node.keys())
    out = {MULTIPROCESS: "/tmp"} if node.get("vllmConfig") else {}
    for value in (value for key, value in node.items() if re.search("env", str(key), re.IGNORECASE)):  # extraEnvVars
        out |= {str(name): launch.substitute(str(each), {}) for name, each in _variables(value).items()}
    out |= {NETWORK: "host"} if is_host else {}
    out |= dict.fromkeys((marks.CONTAINER, marks.ALONE), "1") if is_container and not is_host else {}
    out |= {marks.MORE: "1"} if node.get("kind") in _MAKERS or node.keys() & {"envFrom", "env_file"} else {}
    out |= {marks.HOST_NETWORK: "1"} if is_host or node.get("hostNetwork") else {}
    out |= {marks.IMAGE: str(image)} if STOCK_IMAGE.match(str(image)) else {}
    for each in (node, *_list(node.get("volumes")), *_list(node.get("volumeMounts"))):
        match each:
            case {"resources": {"limits": {"memory": str(limit)}}}:
                out[marks.MEMORY] = limit
            case {"shm_size": size}:
                out[marks.SHARED] = of_docker(size)
            case {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": limit}}:
                out[f"{marks.SHARED} of {name}"] = str(limit)
            case {"name": name, "mountPath": "/dev/shm"}:
                out[marks.SHARED] = {**known, **out}.get(f"{marks.SHARED} of {name}", "")
    return out


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _variables(given: Any) -> dict[Any, Any]:
    """Return the variables that a container, a service of compose, or Ray's runtime environment sets."""
    if isinstance(given, dict):
        return inner if isinstance(inner := given.get("env_vars"), dict) else given  # of Ray's runtime_env
    pairs = (each.partition("=") for each in _list(given) if isinstance(each, str))
    out = {name: value if equals else _VALUE_FROM for name, equals, value in pairs}
    named = (each for each in _list(given) if isinstance(each, dict) and each.get("name"))
    return out | {str(each["name"]): each.get("value", _VALUE_FROM) for each in named}
