"""Read one engine's launch: the value of --kv-transfer-config, vLLM's command line, and the lines of a shell.

A shell's variable has the value that the same text assigns, or its default; all else is not known here.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvobs.cli.check import flags as marks
from kvobs.cli.check.flags import (
    DYNAMO_VLLM,
    LAUNCHER,
    SIZE,
    UnreadableError,
    options_of,
    require_numbers,
    with_offloading,
)
from kvobs.schema import kinds
from kvobs.schema.findings import Finding

NETWORK = "network_mode"
"""The key among the variables that names whose ports an engine takes, if that is known."""
OPTION = "kv-transfer-config"
HAS_OPTION = re.compile(r"(?:^|[\s\"'=(])--kv[-_](?:transfer[-_]config|offloading[-_]size)\b")
STARTS_VLLM = re.compile(rf"\bvllm\s+serve\b|\bvllm\.entrypoints\b|\b{re.escape(DYNAMO_VLLM)}\b")
UNKNOWN = re.compile(r"\$\([^)]*\)?|\$\{[^}]*\}?|\$\w+|`[^`]*`|\{\{.*?(?:\}\}|$)|\{%.*?%\}", re.DOTALL)
"""What a shell or a template replaces."""
STOCK_IMAGE = re.compile(
    r"(?:docker\.io/)?(?:vllm|lmcache|rocm)/vllm(?!-ascend)[\w-]*(?:[:@][\w.:-]+)?$"
    r"|(?:ghcr\.io/llm-d/llm-d-|nvcr\.io/nvidia/(?:ai-dynamo/)?vllm|public\.ecr\.aws/q9t5s3a7/vllm-)\S+$"
)
"""Images that others publish, which have vLLM and no kvobs."""
_OTHER = re.compile(r"atom\.entrypoints|sglang|dynamo\.(?:sglang|trtllm)|trtllm-serve|lmdeploy|mindie|tritonserver")
_FEW = 3  # of the unknown are named
_TEXT = r'"(?:[^"\\]|\\.)*"'
_NUMBER = re.compile(rf"({_TEXT})|(?<![.\w])(\d+(?:\.\d+)?(?=[kmgt])|\d+)([kKmMgGtT])\b")
_BARE = re.compile(rf"({_TEXT})|[\w.+-]*(?:{UNKNOWN.pattern})(?:{UNKNOWN.pattern}|[\w.+-])*", re.DOTALL)
_FACTORS = {unit: base**i for base, units in ((1000, "kmgt"), (1024, "KMGT")) for i, unit in enumerate(units, 1)}
_JSON = "it needs double quotes around names and strings, and has no comments and no comma before a closing bracket"
_UNQUOTED = f"{_JSON}; a shell removes double quotes that are not within single quotes"
_QUOTED = "the single quotes around it reach vLLM: no shell removes them here"
_STANDS_FOR_JSON = re.compile(r"\s*(?:<.*>|\{?\s*\.{3}\s*\}?|[A-Z][A-Z_]+)\s*", re.DOTALL)  # in a usage text
_STANDS_FOR_IT = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}  # what clashes with nothing


class Source(NamedTuple):
    """One engine's configuration; vLLM's options next to it, by name without dashes, and the variables set for it.

    ``config`` is None if it can't be read: a finding has the reason. ``flags`` is empty if it stands alone;
    ``location`` is where it is in a file of several. ``holes`` are the locations of the values that are not known here.
    """

    config: Mapping[str, Any] | None = None
    flags: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}
    location: str = ""
    findings: tuple[Finding, ...] = ()
    holes: tuple[str, ...] = ()


def attempt(location: str, read: Callable[..., Source | Iterable[Source]], *given: Any) -> list[Source]:
    """Return what a part of a text has; of one that can't be read, the reason."""
    try:
        found = read(*given)
        return [found] if isinstance(found, Source) else list(found)
    except UnreadableError as error:
        return [Source(location=location, findings=(error.finding,))]


def read_json(text: str) -> tuple[Any, list[str]]:
    """Return the value of JSON, and the keys that are in one object more than once; unknown values become texts."""
    repeated = list[str]()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated.extend(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
        return dict(pairs)

    try:
        # Numbers such as 80G and 1.5g are 80 * 2**30 and 1.5 * 10**9, as in vLLM's parser.
        whole = _NUMBER.sub(lambda match: match[1] or str(int(float(match[2]) * _FACTORS[match[3]])), text)
        whole = UNKNOWN.sub(lambda match: re.sub(r'["\\\s]+', " ", match[0]), whole)
        whole = _BARE.sub(lambda match: match[1] or f'"{match[0]}"', whole)
        return json.loads(whole, object_pairs_hook=unique), repeated
    except RecursionError:
        raise UnreadableError(kinds.DEEP) from None
    except (ValueError, OverflowError) as error:  # of a number with hundreds of digits and a suffix
        if names := unknown_in(text) or (
            _STANDS_FOR_JSON.fullmatch(text) and f"{text}, which stands for a configuration"
        ):
            raise UnreadableError(kinds.HOLES, names=names) from None
        why = _UNQUOTED if "{" in text and '"' not in text else _JSON
        why = _QUOTED if re.fullmatch(r"\s*'.*'\s*", text, re.DOTALL) else why
        raise UnreadableError(kinds.JSON, error=error, why=why) from None


def unknown_in(text: str) -> str:
    """Return the parts of a text that a shell or a template replaces, as a phrase; empty if it has none."""
    names = [*dict.fromkeys(UNKNOWN.findall(text))]
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return f"{', '.join(names[:_FEW])}{more}, whose value is not known here" if names else ""


def source_of(given: Any, flags: Mapping[str, Any], environment: Mapping[str, str], location: str) -> Source:
    """Return what vLLM makes of an option's value, JSON or an object, and of the other options."""
    require_numbers(flags)
    text = given if isinstance(given, str) else json.dumps({} if given is None else given, default=str)
    config, repeated = read_json(text)
    names = unknown_in(text)
    if not isinstance(config, dict):
        kind = kinds.HOLES if names else kinds.NO_OBJECT
        raise UnreadableError(kind, names=names, type=type(config).__name__)
    found = [kinds.KEY_TWICE.at(f"--{OPTION}", key=key, where="object") for key in repeated]
    config, more = with_offloading(config, flags, environment)
    config = json.loads(json.dumps(config, default=str))
    found += [*more, *([kinds.HOLES.at("CONFIG", names=names)] if names else ())]
    return Source(config, flags, environment, location, tuple(found), tuple(_fill(config, "")) if names else ())


def _fill(node: Any, path: str) -> Iterator[str]:
    """Yield the paths of unknown values, of which some get another value."""
    items = list(node.items()) if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        where = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip(".")
        if isinstance(value, str) and UNKNOWN.search(value):
            node[key] = _STANDS_FOR_IT.get(str(key), value)
            yield where
        yield from _fill(value, where)


def read_words(words: Sequence[str], location: str, environment: Mapping[str, str]) -> Source:
    """Read a command's words."""
    given, flags = list[str](), dict[str, Any]()
    if other := next(filter(None, map(_OTHER.search, words)), None):
        raise UnreadableError(kinds.OTHER_SERVER, server=other[0])
    flags[LAUNCHER] = next((word for word in words if word in (DYNAMO_VLLM, "vllm.entrypoints.openai.api_server")), "")
    flags |= {"model": words[at]} if "serve" in words[:-1] and words[at := words.index("serve") + 1][:1] != "-" else {}
    for name, value in options_of(words):
        if name.startswith(f"{OPTION}."):
            raise UnreadableError(kinds.PARTS, name=name)
        if name == OPTION:
            given.append(value or "")
        elif value is None or not UNKNOWN.search(value):
            flags[name] = True if value is None else value
    if not given and SIZE not in flags:
        raise UnreadableError(kinds.DYNAMO if DYNAMO_VLLM in words else kinds.FORM)
    source = source_of(given[-1] if given else None, flags, environment, location)
    if len(given) > 1:
        more = kinds.OPTION_TWICE.at(f"--{OPTION}", times=len(given))
        source = source._replace(findings=(more, *source.findings))
    return source


_DOCKER = re.compile(r"\b(?:docker|podman|nerdctl)\b")
_ELSEWHERE = re.compile(r"\b(?:docker|kubectl|podman|nerdctl|srun|ssh)\b(?!.*--net(?:work)?[ =]host\b)")
_ASSIGNMENT = re.compile(r"(?:Environment=|--env=)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"""<<-?\s*(['"]?)(\w+)\1.*?^\s*\2$""", re.DOTALL | re.MULTILINE)
_PART = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(\r?\n|.)""", re.DOTALL)
_WORD = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\(?:\r\n|.)|\$\([^()]*\)|\$\(|[^\s;&|()'"\\])+"""
_TOKEN = re.compile(rf"([;&|\n]+)|\\\r?\n|#(?:\\\r?\n|[^\n])*|({_WORD})|([()])|(['\"])", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*|\{.*\}))?\})", re.DOTALL)
_SAYS = ("echo", "printf", "cat", "log", "info", "warn", "error", "die")
_APOSTROPHE = re.compile(r"(?<=[a-zA-Z])'(?=[a-z]{1,2}\b)")  # of prose


def read_script(
    text: str, location: str, environment: Mapping[str, str], *, is_folded: bool = False
) -> Iterator[Source]:
    """Read the engines that a shell's line or script starts, or a unit of systemd.

    ``is_folded``: YAML has put its lines together, but for those that are indented more deeply.
    """
    known: dict[str, str | None] = {name: value for name, value in environment.items() if not UNKNOWN.search(value)}
    exported, depth = dict(environment), 0
    for number, (command, is_guarded) in enumerate(_commands(text)):
        depth += (command[0] in ("if", "case")) - (command[0] in ("fi", "esac"))
        words = [substitute(word, known) for word in command]
        given = {match[1]: match for word in command if (match := _ASSIGNMENT.fullmatch(word))}
        values = {name: substitute(match[3], known) for name, match in given.items()}
        if command[0] == "export" or command[0].startswith("Environment="):
            exported |= values
        line = " ".join(words)
        network = "" if _ELSEWHERE.search(line) else environment.get(NETWORK, f"of {location}")
        variables = {**exported, **values, NETWORK: network}
        variables |= {marks.ALONE: "1"} if not network and _DOCKER.search(line) else {}
        variables |= {marks.IMAGE: image} if (image := next(filter(STOCK_IMAGE.match, words), "")) else {}
        if is_folded and number and HAS_OPTION.match(words[0]):
            yield Source(location=location, findings=(kinds.FOLDED.at("CONFIG"),))
        elif any(map(HAS_OPTION.match, words)) or (DYNAMO_VLLM in words and "--connector" in words):
            yield from attempt(location, read_words, words, location, variables)
        for word in () if words[0] in _SAYS else words:  # a line for another shell: bash -c, ssh
            if HAS_OPTION.search(word) and STARTS_VLLM.search(word) and " " in word:
                yield from read_script(word, location, variables)
        for name, value in values.items():
            known[name] = None if depth or is_guarded or given[name][2] else value


def _commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """Yield the words of each command, and whether it depends on a test before it."""
    words, is_guarded, in_array = list[str](), False, False
    text = _HERE_DOCUMENT.sub("", text)
    if any(token[4] for token in _TOKEN.finditer(text)):
        text = _APOSTROPHE.sub("\u2019", text)
    for token in _TOKEN.finditer(f"{text}\n;"):
        end, word, bracket, quote = token.groups()
        if quote:
            is_script = "\n" in text.replace("\\\n", "").strip()  # which may have more syntax than is read here
            raise UnreadableError(kinds.QUOTE_IN_SCRIPT if is_script else kinds.QUOTE)
        if word:
            words.append(_PART.sub(_unquoted, word))
        elif bracket:
            in_array = bracket == "(" and text[token.start() - 1] == "="
        elif end and words and not in_array:
            yield words, is_guarded
            is_guarded = end in ("&&", "||") and words[-1] in ("]", "]]")
            words = []


def _unquoted(part: re.Match[str]) -> str:
    if part[2] is not None:
        return re.sub(r'\\(?:\r?\n|(["\\]))', r"\1", part[2])
    return part[1] or (part[3] or "").strip("\r\n")


def substitute(text: str, known: Mapping[str, str | None]) -> str:
    """Return a text with the known variables replaced, and variables that have a default; None means not known."""

    def value(match: re.Match[str]) -> str:
        found = known.get(match[1] or match[2], match[3])
        return match[0] if found is None else found

    return _VARIABLE.sub(value, text)
