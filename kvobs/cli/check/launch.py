"""Read one engine's launch: the value of --kv-transfer-config, vLLM's command line, and a shell's line or script."""

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from kvobs.schema.config import PATH
from kvobs.schema.findings import Finding

LAUNCHER, RAY, DYNAMO_VLLM = "launcher", "engine_kwargs", "dynamo.vllm"
"""The key among the flags that says who starts the engine, and its values; without it `vllm serve` does."""
NETWORK = "network_mode"
"""The key among the variables that says whose ports an engine takes, if that is known."""
OPTION, SIZE = "kv-transfer-config", "kv-offloading-size"
HAS_OPTION = re.compile(r"(?:^|[\s\"'=(])--kv[-_](?:transfer[-_]config|offloading[-_]size)\b")
STARTS_VLLM = re.compile(rf"\bvllm\s+serve\b|\bvllm\.entrypoints\b|\b{re.escape(DYNAMO_VLLM)}\b")
_NUMBERS = {
    *("port", "api-server-count", "data-parallel-size", "data-parallel-size-local", "data-parallel-rpc-port"),
    "pipeline-parallel-size",
}
_NEEDED = re.compile(r"""["'](?:kv_|cpu_bytes)\w*["']\s*:\s*["']?[$`]""")
_NUMBER = re.compile(r'("(?:[^"\\]|\\.)*")|(?<![.\w])(\d+(?:\.\d+)?(?=[kmgt])|\d+)([kKmMgGtT])\b')
_FACTORS = {unit: base**i for base, units in ((1000, "kmgt"), (1024, "KMGT")) for i, unit in enumerate(units, 1)}
_SLIPS = (
    (r",(?=\s*[}\]])", "", "it has a comma before a closing bracket"),
    (r"(?m)(^|\s)//.*$", "", "it has comments, which JSON does not allow"),
    ("[“”„]", '"', 'it has typographic quotes, write " in their place'),
)
_SHORT = {
    "asc": "api-server-count", "dp": "data-parallel-size", "dpe": "data-parallel-external-lb",
    "dph": "data-parallel-hybrid-lb", "dpl": "data-parallel-size-local", "dpn": "data-parallel-rank",
    "dpm": "data-parallel-multi-port-external-lb", "dpp": "data-parallel-rpc-port", "dpr": "data-parallel-start-rank",
    "pp": "pipeline-parallel-size",
}  # fmt: skip


class Source(NamedTuple):
    """One engine's configuration; vLLM's options beside it, by name without dashes, and the variables set for it.

    ``flags`` is empty if it stands alone; ``place`` is where it is in a file of several; ``problem`` why it isn't read.
    """

    config: Mapping[str, Any]
    flags: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    place: str = ""
    warnings: tuple[Finding, ...] = ()
    problem: str = ""


def tried(place: str, read: Callable[..., Source | Iterable[Source]], *given: Any) -> list[Source]:
    """Return what a part of a text has; of one that can't be read, the reason."""
    try:
        found = read(*given)
        return [found] if isinstance(found, Source) else list(found)
    except ValueError as error:
        return [Source({}, place=place, problem=str(error))]


def read_object(text: str, twice: list[str]) -> Mapping[str, Any]:
    """Return an object from JSON; add the keys that are in one object more than once."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return dict(pairs)

    text = _plain(text)
    try:
        config = json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("the configuration is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the configuration is not valid JSON: {_slip(text)}{error}") from None
    return _checked(config)


def _plain(text: str) -> str:
    """Return JSON with numbers such as 80G and 1.5g, 80 * 2**30 and 1.5 * 10**9, written out, as vLLM's parser does."""
    return _NUMBER.sub(lambda match: match[1] or str(int(float(match[2]) * _FACTORS[match[3]])), text)


def _checked(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, dict):
        raise ValueError(f"the configuration is a {type(config).__name__}, needs an object with the key 'kv_connector'")
    return config


def _slip(text: str) -> str:
    """Return the usual slip that keeps a text from being JSON, or an empty text."""
    for slip, right, problem in _SLIPS:
        if _is_object(json.loads, re.sub(slip, right, text)):
            return f"{problem}: "
    if _is_object(ast.literal_eval, text.strip()):
        return "it is written as in Python; JSON has double quotes, true, false and null: "
    if re.fullmatch(r"""\s*(['"`])\s*\{.*\}\s*\1\s*""", text, re.DOTALL):
        return "it has quotes around it, remove them: "
    if re.match(r"\s*\{\s*[A-Za-z_]\w*\s*:", text):
        return "its quotes are missing, as if a shell had removed them, put it in single quotes: "
    return ""


def _is_object(parse: Callable[[str], Any], text: str) -> bool:
    with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return isinstance(parse(text), dict)
    return False


def source_of(
    given: Any, flags: Mapping[str, Any], environment: Mapping[str, str], place: str, twice: Sequence[str] = ()
) -> Source:
    """Return what vLLM makes of an option's value, JSON or an object, and of the other options."""
    for name in _NUMBERS & flags.keys():
        if not str(flags[name]).isdecimal():
            value = json.dumps(flags[name], default=str)
            raise ValueError(f"--{name} {value}, beside the configuration, is not a whole number")
    keys = [*twice]
    unknown = list(dict.fromkeys(_UNKNOWN.findall(given))) if isinstance(given, str) else []
    try:
        config = {} if given is None else read_object(given, keys) if isinstance(given, str) else _checked(given)
        if unknown and _NEEDED.search(given):
            raise ValueError
    except ValueError as error:
        names = f"--{OPTION} has {', '.join(unknown)}, whose value is not known here: write it in its place"
        raise ValueError(names if unknown else str(error)) from None
    text, fix = "found the key {!r} twice in one object: the first has no effect", "remove one of them"
    warnings = [Finding(f"--{OPTION}", text.format(key), fix=fix) for key in keys]
    text, fix = "has {}, whose value is not known here, and not checked", "write the value in its place to check it"
    warnings += [Finding(f"--{OPTION}", text.format(name), fix=fix) for name in unknown]
    if (size := flags.get(SIZE)) is not None:
        name = "LMCacheMPConnector"
        extra = dict(config[PATH]) if isinstance(config.get(PATH), dict) else {}
        if flags.get("kv-offloading-backend") != "lmcache":
            is_simple = environment.get("VLLM_USE_SIMPLE_KV_OFFLOAD", "0") not in ("0", "")
            name = "SimpleCPUOffloadConnector" if is_simple else "OffloadingConnector"
            with suppress(TypeError, ValueError, OverflowError):
                extra["cpu_bytes_to_use"] = int(float(size) * (1 << 30))
        config = {**config, "kv_connector": name, "kv_role": "kv_both", PATH: extra}
        text = f"vLLM makes {name} of it, in the place of any kv_connector of --{OPTION}"
        warnings.append(Finding(f"--{SIZE}", text, fix="remove it, and use a configuration, as --rewrite prints it"))
    return Source(json.loads(json.dumps(config, default=str)), flags, environment, place, tuple(warnings))


# vLLM's command line


def of_words(words: Sequence[str], place: str, environment: Mapping[str, str]) -> Source:
    """Read a command's words: the option as JSON, or its parts by dotted names."""
    given, parts, twice = list[Any](), dict[str, Any](), list[str]()
    launcher = next((word for word in words if word in (DYNAMO_VLLM, "vllm.entrypoints.openai.api_server")), None)
    flags: dict[str, Any] = {LAUNCHER: launcher} if launcher else {}
    for name, value in _options(words):
        key, _, rest = name.partition(".")
        if key == OPTION and value is None:
            raise ValueError(f"--{OPTION} has no value")
        if key == OPTION and rest:
            _put(parts, rest, value or "", twice)
        elif key == OPTION:
            given.append(value)
        if value is None or not re.search(r"\$|\{\{", value):
            flags[key] = True if value is None else value
    given += [json.dumps(parts)] if parts else []  # vLLM reads them last, wherever they are
    if not given and SIZE not in flags:
        raise ValueError(f"the line has no --{OPTION} that can be read")
    source = source_of(given[-1] if given else None, flags, environment, place, twice)
    if len(given) > 1:
        found = f"found {len(given)} of this option (dotted names count as one): only the last has an effect"
        more = Finding(f"--{OPTION}", found, fix="keep one, with all connectors")
        source = source._replace(warnings=(more, *source.warnings))
    return source


def _put(config: dict[str, Any], name: str, given: str, twice: list[str]) -> None:
    """Set a value at a dotted place, or add to the one there, as vLLM's command line does."""
    *outer, last = name.removesuffix("+").split(".")
    value: Any = given.split(",") if name.endswith("+") else given
    with suppress(ValueError, RecursionError, TypeError):
        value = json.loads(_plain(value))
    for part in outer:
        if not isinstance(config.setdefault(part, {}), dict):
            twice.append(part)
            config[part] = {}
        config = config[part]
    old: Any = config.get(last)
    is_more = any(isinstance(old, kind) and isinstance(value, kind) for kind in (dict, list))
    twice += [last] if last in config and not is_more else []
    config[last] = (old | value if isinstance(old, dict) else old + value) if is_more else value


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


# A shell

_ELSEWHERE = re.compile(r"\b(?:docker|kubectl|podman|srun|ssh)\b(?!.*--net(?:work)?[ =]host\b)")
_SEPARATORS = ";&|()\n"
_CONTAINERS = {"docker", "nerdctl", "podman"}
_ASSIGNMENT = re.compile(r"(?:Environment=|--env=|-e)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"(?ms)(?<!<)(<<-?\s*\\?(['\"]?)(\w+)\2[^\n]*\n)(?:.*?\n)??[ \t]*\3[ \t]*$")
_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'[^']*'|\\.)|(?<![^\s;&|()])#(?:\\\r?\n|[^\n])*""", re.DOTALL)
_BRACED = r"[^{}]*+"
for _ in range(8):  # as deep as the JSON of a default
    _BRACED = rf"(?:[^{{}}]|\{{{_BRACED}\}})*+"
_VARIABLE = re.compile(rf"\$(?:(\w+)|\{{(\w+)(?::?([-=?])({_BRACED}))?\}}|\((\w+)\))")
_UNKNOWN = re.compile(rf"\$\w+|\$\{{{_BRACED}\}}|\$\([^)]*\)|`[^`]*`|\{{\{{.*?\}}\}}|\$$", re.DOTALL)


def of_script(text: str, place: str, environment: Mapping[str, str]) -> Iterator[Source]:
    """Read a shell's line or script, or a unit of systemd."""
    known, exported = dict(environment), dict(environment)
    for command in _commands(text):
        words = expanded(command, known)
        given = _assigned(words)
        known |= given
        if words and (words[0] in ("export", "declare", "typeset", "ENV") or words[0].startswith("Environment=")):
            exported |= given | {word: known[word] for word in words if word in known}
        elif words and words[0] == "unset":
            exported = {name: value for name, value in exported.items() if name not in words}
        network = "" if _ELSEWHERE.search(" ".join(words)) else environment.get(NETWORK, f"of {place}")
        variables = {**_passed_on(words, exported | given), NETWORK: network}
        if any(map(HAS_OPTION.match, words)):
            yield from tried(place, of_words, words, place, variables)
        for word in words:  # a line for another shell: bash -c, ssh
            if HAS_OPTION.search(word) and STARTS_VLLM.search(word) and " " in word:
                yield from of_script(word, place, variables)


def _passed_on(words: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an engine gets of a command's: in a container those that the command names."""
    start = next((i for i, word in enumerate(words) if word in _CONTAINERS), None)
    if start is None:
        return dict(variables)
    named = {word.removeprefix("--env=") for word in words[start:]}
    return {name: value for name, value in variables.items() if name in named} | _assigned(words[start:])


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; a here-document counts if it starts vLLM."""
    text = _HERE_DOCUMENT.sub(lambda match: match[0] if HAS_OPTION.search(match[0]) else match[1], text)
    text = re.sub(r"\\\r?\n", " ", _COMMENT.sub(lambda match: match[1] or "", text))
    text = re.sub(r"(?<=[\s=])\$(?=')", "", text)  # bash's $'...'
    lexer = shlex.shlex(re.sub(r"\$\(\(.*?\)\)+", "$arithmetic", text), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        for is_end, words in groupby(lexer, lambda word: bool(word) and set(word) <= set(_SEPARATORS)):
            if not is_end:
                yield list(words)
    except ValueError as error:
        raise ValueError(f"the line has a quote that is not closed: {error}") from None


def _assigned(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that a command sets; one that the shell computes stands for itself."""
    given = (match.groups() for word in words if (match := _ASSIGNMENT.fullmatch(word)))
    return {name: f"${name}" if value.startswith(("$", "`")) else value for name, value in given}


def filled(text: str, known: Mapping[str, str]) -> str:
    """Return a text with the known variables replaced, and the others that have a default."""

    def value_of(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[5]
        if match[3] in ("-", "="):  # ${NAME:-default}
            return known.get(name) or filled(match[4], known)
        return known.get(name, match[0])

    return _VARIABLE.sub(value_of, text)


def expanded(words: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Return words with their variables filled; one that is a variable with options becomes several words."""
    out: list[str] = []
    for word in words:
        value = filled(word, known)
        has_options = word[0:1] == "$" and value.startswith("--")
        out += (shlex.split(value) if "'" in value else value.split()) if has_options else [value]
    return out
