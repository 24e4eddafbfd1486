"""Read one engine's launch: the value of --kv-transfer-config, vLLM's command line, and the lines of a shell.

A shell's variable has the value that the same text assigns, or its default, one level deep; all else is not known here.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvobs.cli.check.flags import DYNAMO_VLLM, LAUNCHER, SIZE, options_of, require_numbers, with_offloading
from kvobs.schema.findings import Finding

NETWORK = "network_mode"
"""The key among the variables that says whose ports an engine takes, if that is known."""
OPTION = "kv-transfer-config"
HAS_OPTION = re.compile(r"(?:^|[\s\"'=(])--kv[-_](?:transfer[-_]config|offloading[-_]size)\b")
STARTS_VLLM = re.compile(rf"\bvllm\s+serve\b|\bvllm\.entrypoints\b|\b{re.escape(DYNAMO_VLLM)}\b")
UNKNOWN = re.compile(r"\$\([^)]*\)?|\$\{[^}]*\}?|\$\w+|`[^`]*`|\{\{.*?(?:\}\}|$)", re.DOTALL)
"""What a shell or a template replaces."""
_NUMBER = re.compile(r'("(?:[^"\\]|\\.)*")|(?<![.\w])(\d+(?:\.\d+)?(?=[kmgt])|\d+)([kKmMgGtT])\b')
_FACTORS = {unit: base**i for base, units in ((1000, "kmgt"), (1024, "KMGT")) for i, unit in enumerate(units, 1)}
_JSON = "it needs double quotes around names and texts, and has no comments and no comma before a closing bracket"
_QUOTED = "the single quotes around it reach vLLM: no shell removes them here"


class Source(NamedTuple):
    """One engine's configuration; vLLM's options beside it, by name without dashes, and the variables set for it.

    ``flags`` is empty if it stands alone; ``place`` is where it is in a file of several. One that can't be read has a
    ``problem``, or, if it may be right, ``unknown``: what is not known here.
    """

    config: Mapping[str, Any] = {}
    flags: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    place: str = ""
    warnings: tuple[Finding, ...] = ()
    problem: str = ""
    unknown: str = ""


class NotKnownError(ValueError):
    """The configuration depends on what only a shell, a template or another program knows."""


def attempt(place: str, read: Callable[..., Source | Iterable[Source]], *given: Any) -> list[Source]:
    """Return what a part of a text has; of one that can't be read, the reason."""
    try:
        found = read(*given)
        return [found] if isinstance(found, Source) else list(found)
    except NotKnownError as error:
        return [Source(place=place, unknown=str(error))]
    except ValueError as error:
        return [Source(place=place, problem=str(error))]


def read_json(text: str) -> tuple[Any, list[str]]:
    """Return the value of JSON, and the keys that are in one object more than once."""
    repeated = list[str]()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return dict(pairs)

    # Numbers such as 80G and 1.5g are 80 * 2**30 and 1.5 * 10**9, as in vLLM's parser.
    text = _NUMBER.sub(lambda match: match[1] or str(int(float(match[2]) * _FACTORS[match[3]])), text)
    try:
        return json.loads(text, object_pairs_hook=unique), repeated
    except RecursionError:
        raise ValueError("the configuration is nested too deeply") from None
    except ValueError as error:
        require_known("the configuration", text)
        why = _QUOTED if re.fullmatch(r"\s*'.*'\s*", text, re.DOTALL) else _JSON
        raise ValueError(f"the configuration is not valid JSON: {error}; {why}") from None


def require_known(what: str, text: str) -> None:
    """Raise ``NotKnownError`` if a text has parts that a shell or a template replaces."""
    if names := dict.fromkeys(UNKNOWN.findall(text)):
        raise NotKnownError(f"{what} has {', '.join(names)}, whose value is not known here")


def source_of(given: Any, flags: Mapping[str, Any], environment: Mapping[str, str], place: str) -> Source:
    """Return what vLLM makes of an option's value, JSON or an object, and of the other options."""
    require_numbers(flags)
    config, repeated = read_json(given) if isinstance(given, str) else ({} if given is None else given, [])
    if not isinstance(config, dict):
        raise ValueError(f"the configuration is a {type(config).__name__}, needs an object with the key 'kv_connector'")
    warnings = [repetition(f"--{OPTION}", key, "object") for key in repeated]
    config, more = with_offloading(config, flags, environment)
    return Source(json.loads(json.dumps(config, default=str)), flags, environment, place, (*warnings, *more))


def repetition(path: str, key: str, kind: str) -> Finding:
    return Finding(
        path, f"found the key {key!r} twice in one {kind}: the first has no effect", fix="remove one of them"
    )


def read_words(words: Sequence[str], place: str, environment: Mapping[str, str]) -> Source:
    """Read a command's words."""
    given = list[str]()
    launchers = (word for word in words if word in (DYNAMO_VLLM, "vllm.entrypoints.openai.api_server"))
    flags: dict[str, Any] = {LAUNCHER: next(launchers, "")}
    for name, value in options_of(words):
        if name.startswith(f"{OPTION}."):
            raise NotKnownError(f"--{name} is a part of --{OPTION}, which is not known here in parts")
        if name == OPTION:
            given.append(value or "")
        elif value is None or not UNKNOWN.search(value):
            flags[name] = True if value is None else value
    if not given and SIZE not in flags:
        raise NotKnownError(f"the line has --{OPTION} in a form that is not known here")
    require_known(f"--{OPTION}", "".join(given[-1:]))
    source = source_of(given[-1] if given else None, flags, environment, place)
    if len(given) > 1:
        found = f"found {len(given)} of this option: only the last has an effect"
        more = Finding(f"--{OPTION}", found, fix="keep one, with all connectors")
        source = source._replace(warnings=(more, *source.warnings))
    return source


_ELSEWHERE = re.compile(r"\b(?:docker|kubectl|podman|srun|ssh)\b(?!.*--net(?:work)?[ =]host\b)")
_SEPARATORS = ";&|\n"
_ASSIGNMENT = re.compile(r"(?:Environment=|--env=)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_QUOTES = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
_PARTS = re.compile(rf"({_QUOTES})|\\(?:\r?\n|\Z)|(\\.)|(?<![^\s;&|()])#(?:\\\r?\n|[^\n])*", re.DOTALL)
_ARRAY = re.compile(rf"""\b(\w+\+?=)\(((?:{_QUOTES}|[^()"'])*)\)""")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*|\{.*\}))?\})", re.DOTALL)


def read_script(text: str, place: str, environment: Mapping[str, str]) -> Iterator[Source]:
    """Read the engines that a shell's line or script starts, or a unit of systemd."""
    known, exported = dict[str, str](), dict(environment)
    for command in _commands(text):
        given = {match[1]: match[2] for word in command if (match := _ASSIGNMENT.fullmatch(word))}
        known = {name: value for name, value in (known | given).items() if not UNKNOWN.search(value)}
        if command[0] == "export" or command[0].startswith("Environment="):
            exported |= given
        words = [substitute(word, known) for word in command]
        network = "" if _ELSEWHERE.search(" ".join(words)) else environment.get(NETWORK, f"of {place}")
        variables = {**exported, **given, NETWORK: network}
        if any(map(HAS_OPTION.match, words)):
            yield from attempt(place, read_words, words, place, variables)
        for word in words:  # a line for another shell: bash -c, ssh
            if HAS_OPTION.search(word) and STARTS_VLLM.search(word) and " " in word:
                yield from read_script(word, place, variables)


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command."""
    text = _PARTS.sub(_part, text)
    text = _ARRAY.sub(lambda match: f"{match[1]} {match[2]} ".replace("\n", " "), text)
    lexer = shlex.shlex(text.replace("')", "' )"), posix=True, punctuation_chars=_SEPARATORS)  # a subshell's end
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        for is_end, words in groupby(lexer, lambda word: bool(word) and set(word) <= set(_SEPARATORS)):
            if not is_end:
                yield list(words)
    except ValueError as error:
        if "<<" in text:
            raise NotKnownError("the text has a here-document, which is not known here") from None
        raise ValueError(f"the line has a quote that is not closed: {error}") from None


def _part(match: re.Match[str]) -> str:
    """Return a part of a shell's text as the shell reads it."""
    if quoted := match[1]:
        return quoted if quoted[0] == "'" else re.sub(r"\\\r?\n", "", quoted)
    return match[2] or (" " if match[0][0] == "\\" else "")


def substitute(text: str, known: Mapping[str, str]) -> str:
    """Return a text with the known variables replaced, and the others that have a default."""
    return _VARIABLE.sub(
        lambda match: known.get(match[1] or match[2], match[0] if match[3] is None else match[3]), text
    )
