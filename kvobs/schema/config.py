"""Read the options under ``kv_connector_extra_config.kvobs``.

Every error is reported at once, each with the JSON path, what was found, and what is allowed.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from kvobs.log import once
from kvobs.schema import kinds
from kvobs.schema.findings import Finding, cut, show
from kvobs.schema.options import GONE, ExporterOptions, Options, TracingOptions, VerifyOptions
from kvobs.schema.signals import CONNECTORS_AT_MOST

__all__ = ["ConfigError", "Configuration", "ExporterOptions", "Options", "TracingOptions", "VerifyOptions", "read"]

PATH = "kv_connector_extra_config"
EXPORTER_VARIABLE = "KVOBS_EXPORTER"
"""Switches the exporter on without the option; the option counts where both are set."""
ENABLE_VARIABLE = "KVOBS_ENABLE"
"""Enables kvobs without a configuration key."""
STOCK_VARIABLE = "KVOBS_USE_VLLM"
"""Names the parts of vLLM that kvobs is not to replace, separated by commas."""
_OLD_STOCK_VARIABLE = "KVOBS_STOCK"
STOCK = ("aggregator", "block_copy")
RESERVED_NAME = "kvobs"  # kvobs's entry in the stats payload
_LISTED_AT_MOST = 15  # errors
_ON = {"1", "true", "yes", "on"}
_OFF = {"", "0", "false", "no", "off"}
_NUMBERS = {"integer": "an integer", "number": "a number"}  # types of JSON schema
_LIMITS = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "up to"}
_OF_NUMBERS = ("int_", "float_", "finite_", "greater_", "less_")  # begin the kinds of pydantic's errors
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,63}")


class ConfigError(ValueError):
    """The connector configuration has errors; the message lists them, one per line."""

    def __init__(self, mistakes: Iterable[Finding]) -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(self.mistakes)

    def __str__(self) -> str:
        listed = [str(mistake) for mistake in self.mistakes[:_LISTED_AT_MOST]]
        if len(self.mistakes) > _LISTED_AT_MOST:
            listed.append(f"{len(self.mistakes) - _LISTED_AT_MOST} more errors; kvobs check lists all")
        text = listed[0] if len(listed) == 1 else "".join(f"\n- {mistake}" for mistake in listed)
        return f"kvobs can't start with this --kv-transfer-config: {text}"


class Configuration(NamedTuple):
    """A checked configuration: the options, and the connectors' names in the order of ``connectors``.

    ``stock`` are the parts of vLLM, out of STOCK, that stay in place.
    """

    options: Options
    names: tuple[str, ...]
    stock: frozenset[str] = frozenset()


def is_enabled(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether ``ENABLE_VARIABLE`` is set; only a clear yes enables kvobs."""
    value = variables.get(ENABLE_VARIABLE, "")
    word = value.strip().lower()
    if word not in _ON | _OFF:
        text = "%s is %r, allowed: 1 or 0; kvobs is not enabled"
        once("enable", logging.WARNING, text, ENABLE_VARIABLE, value)  # vLLM registers several times in a process
    return word in _ON


def read(extra_config: Mapping[str, Any]) -> Configuration:
    """Check ``kv_connector_extra_config`` and return the options and the connectors' names.

    Raises:
        ConfigError: with every error found, each with its JSON path.
    """
    configuration, mistakes = validate(extra_config)
    if mistakes:
        raise ConfigError(mistakes)
    return configuration


def validate(extra_config: Mapping[str, Any]) -> tuple[Configuration, list[Finding]]:
    """Return the options and the connectors' names, and the errors; an invalid option has its default."""
    mistakes: list[Finding] = []
    configured = _configured_connectors(extra_config, mistakes)
    raw = extra_config.get("kvobs", {})
    options, refused = _options(raw, mistakes)
    if not (isinstance(raw, Mapping) and "exporter" in raw) and (exporter := _exporter_of_environment(mistakes)):
        options = options.model_copy(update={"exporter": exporter})
    of_names: list[Finding] = []
    names = _names(options.names, configured, of_names)
    mistakes += of_names
    if "names" not in refused:
        mistakes += _unknown_names(raw, list(dict.fromkeys(names)))
    if options.wait_for == "earlier" and options.compares_answers:
        found, allowed = (
            f"'earlier' with load_policy {options.load_policy!r}, which compares all answers",
            "'all', or load_policy 'first'",
        )
        mistakes.append(kinds.OPTION_OF_KVOBS.at(f"{PATH}.kvobs.wait_for", allowed, found=found))
    stock = _stock_of_environment(mistakes)
    if of_names:
        names = _names((), configured, [])
    return Configuration(options, names, stock), mistakes


_NOT_SHOWN = ("[key]", "[auto]", "[options]", "[never]")  # parts of pydantic's paths, not of the configuration


def _configured_connectors(extra_config: Mapping[str, Any], mistakes: list[Finding]) -> list[str]:
    """Return each connector's configured ``kv_connector``; of an invalid one, which is reported, another name."""
    path = f"{PATH}.connectors"
    connectors = extra_config.get("connectors")
    if not isinstance(connectors, list | tuple) or not connectors:
        found = "is missing" if "connectors" not in extra_config else f"found {_kind(connectors)}"
        example = '[{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]'
        allowed = f"a list with at least one connector, such as {example}"
        mistakes.append(kinds.NO_CONNECTORS.at(path, allowed, found=found))
        return []
    if len(connectors) > CONNECTORS_AT_MOST:
        allowed = f"at most {CONNECTORS_AT_MOST}"
        mistakes.append(kinds.MANY_CONNECTORS.at(path, allowed, number=len(connectors)))
    configured = []
    for i, connector in enumerate(connectors):
        configured.append(str(i))
        if not isinstance(connector, Mapping):
            found, allowed = f"found {_kind(connector)}", "an object with the key 'kv_connector'"
            mistakes.append(kinds.NO_CONNECTORS.at(f"{path}[{i}]", allowed, found=found))
        elif not isinstance(connector.get("kv_connector"), str) or not connector["kv_connector"]:
            found = f"found {show(connector['kv_connector'])}" if "kv_connector" in connector else "is missing"
            allowed = "the name of a connector class"
            mistakes.append(kinds.NO_CONNECTOR.at(f"{path}[{i}].kv_connector", allowed, found=found))
        else:
            configured[i] = connector["kv_connector"]
    return configured


def _options(raw: Any, mistakes: list[Finding]) -> tuple[Options, set[object]]:
    """Return the valid options, and the names of the others."""
    path = f"{PATH}.kvobs"
    if not isinstance(raw, Mapping):
        allowed = f"an object with any of: {', '.join(map(repr, _known_options()))}"
        mistakes.append(kinds.OPTION_OF_KVOBS.at(path, allowed, found=show(raw)))
        return Options(), set()
    raw = {str(key).encode(errors="backslashreplace").decode(): value for key, value in raw.items()}  # JSON's "\\ud800"
    try:
        return Options.model_validate(raw), set()
    except ValidationError as error:
        for detail in error.errors():
            loc = [part if isinstance(part, int) else cut(part) for part in detail["loc"] if part not in _NOT_SHOWN]
            where = path + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
            if (name := ".".join(map(str, loc))) in GONE:
                fix = GONE[name]
                mistakes.append(kinds.GONE_OPTION.at(where, fix=fix, found=show(detail["input"])))
            elif detail["type"] == "extra_forbidden":
                mistakes.append(kinds.UNKNOWN_OPTION.near(where, str(loc[-1]), _known_options(loc)))
            else:
                problem, allowed = explain(detail["type"], detail["msg"])
                if detail["type"].startswith(_OF_NUMBERS):
                    allowed = numbers(*_option_at(loc))
                found = f"{show(detail['input'])}{problem}"
                mistakes.append(kinds.OPTION_OF_KVOBS.at(where, allowed, found=found))
        refused: set[object] = {detail["loc"][0] for detail in error.errors()}
        return Options.model_validate({key: value for key, value in raw.items() if key not in refused}), refused


def _exporter_of_environment(mistakes: list[Finding]) -> ExporterOptions | None:
    """Return the exporter that the environment asks for, if any: HOST:PORT."""
    value = os.environ.get(EXPORTER_VARIABLE, "")
    if not value:
        return None
    host, _, port = value.rpartition(":")
    try:
        return ExporterOptions(host=host.removeprefix("[").removesuffix("]"), port=int(port))
    except ValueError:
        allowed = "HOST:PORT with a port from 1 to 65535, such as 127.0.0.1:9464"
        mistakes.append(kinds.VARIABLE.at(f"environment variable {EXPORTER_VARIABLE}", allowed, found=show(value)))
        return None


def _stock_of_environment(mistakes: list[Finding]) -> frozenset[str]:
    if (old := os.environ.get(_OLD_STOCK_VARIABLE)) is not None:
        fix = f"use {STOCK_VARIABLE}"
        mistakes.append(kinds.GONE_OPTION.at(f"environment variable {_OLD_STOCK_VARIABLE}", fix=fix, found=show(old)))
    parts = frozenset(part.strip() for part in os.environ.get(STOCK_VARIABLE, "").split(",")) - {""}
    mistakes += [
        kinds.VARIABLE.at(f"environment variable {STOCK_VARIABLE}", ", ".join(STOCK), found=show(part))
        for part in sorted(parts.difference(STOCK))
    ]
    return parts


def _names(given: Sequence[str], configured: Sequence[str], mistakes: list[Finding]) -> tuple[str, ...]:
    """Name every connector: by its entry in ``names``, otherwise its ``kv_connector``, numbered if repeated."""
    path = f"{PATH}.kvobs.names"
    if configured and len(given) > len(configured):
        allowed = f"at most {len(configured)}, one per connector"
        mistakes.append(kinds.NAMES.at(path, allowed, "remove the others", found=f"{len(given)} names"))
    for i, name in enumerate(given):
        if name == RESERVED_NAME:
            mistakes.append(kinds.NAMES.at(f"{path}[{i}]", found=f"{name!r}, which is reserved"))
        elif not _NAME.fullmatch(name):
            allowed = "1 to 64 letters, digits and . _ : / + -, beginning with a letter or digit"
            mistakes.append(kinds.NAMES.at(f"{path}[{i}]", allowed, found=show(name)))
    names = list(given[: len(configured)])
    for connector in configured[len(names) :]:
        name, n = connector, 1
        while name in names or name == RESERVED_NAME:
            n += 1
            name = f"{connector}-{n}"
        names.append(name)
    for name, times in Counter(names).items():
        if times > 1:
            found, allowed = f"{show(name)} for {times} connectors", "a distinct name for each"
            mistakes.append(kinds.NAMES.at(path, allowed, "choose other names", found=found))
    return tuple(names)


def _unknown_names(raw: Any, names: list[str]) -> Iterator[Finding]:
    """Yield each name of no connector; also in an option that has another error."""
    for option in ("best_effort", "min_tokens", "link_gbps") if names else ():
        path, given = f"{PATH}.kvobs.{option}", raw.get(option) if isinstance(raw, Mapping) else None
        for i, name in enumerate(given if isinstance(given, list | tuple | Mapping) else ()):
            if not isinstance(name, str) or name in names:
                continue
            if isinstance(given, Mapping):
                yield kinds.UNKNOWN_NAME.near(f"{path}.{cut(name)}", name, names)
            else:
                yield kinds.OPTION_OF_KVOBS.at(f"{path}[{i}]", ", ".join(map(repr, names)), found=show(name))


def _known_options(loc: Sequence[int | str] = ()) -> list[str]:
    """Return the valid options at the place of an unknown one."""
    return list(_option_at(loc)[0].model_fields)


def _option_at(loc: Sequence[int | str]) -> tuple[type[BaseModel], str]:
    """Return the options at a place, and the name of the one there or around it."""
    nested: dict[str, type[BaseModel]] = {
        "tracing": TracingOptions,
        "verify": VerifyOptions,
        "exporter": ExporterOptions,
    }
    model = nested.get(str(loc[0])) if len(loc) > 1 else None
    return (model, str(loc[1])) if model else (Options, str(loc[0]) if loc else "")


def numbers(model: type[BaseModel], name: str) -> str:
    """Return the numbers that an option or each of its entries may be, with its limits."""
    option = model.model_json_schema()["properties"][name]
    parts = (option, *option.get("anyOf", ()), option.get("additionalProperties", {}))
    (number,) = (part for part in parts if part.get("type") in _NUMBERS)
    limits = (f"{words} {number[limit]}" for limit, words in _LIMITS.items() if limit in number)
    return f"{_NUMBERS[number['type']]} {' '.join(limits)}"


def explain(kind: str, message: str) -> tuple[str, str]:
    """Return the problem (beginning with a comma, or empty) and the allowed values of one of pydantic's errors."""
    if kind in ("model_type", "mapping_type", "dict_type"):
        return "", "an object"
    if kind == "bool_type":
        return "", "true or false"
    if kind == "tuple_type":
        return "", "a list of names"
    if kind == "string_too_short":
        return "", message.removeprefix("String should have ")
    before, should_be, allowed = message.removeprefix("Value error, ").partition("Input should be ")
    allowed = allowed.replace("a valid integer", "an integer").replace("a valid ", "a ")
    return (f", {before}" if before else ""), allowed if should_be else ""


def _kind(value: Any) -> str:
    """Describe a value at a connector's place by its type only if it may hold credentials."""
    may_hold = isinstance(value, Mapping | list | tuple) and value
    return f"a value of type {type(value).__name__}" if may_hold else show(value)
