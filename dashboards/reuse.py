"""Panels about reuse: what a cache of any size would serve, where tokens came from, what stores hold and forget."""

from __future__ import annotations

from dashboards import looks, stores
from dashboards.frame import Section
from dashboards.panels import PROMETHEUS, About, Panel, Query, lines, of_connector, ref_id
from dashboards.promql import ratio
from dashboards.questions import SELECTION, VLLM, evicted_too_early
from dashboards.sdk import board, model, prometheus, prometheus_model
from kvobs.schema import signals
from kvobs.schema.signals import REUSE_DISTANCE

SIZE = "Cache size (tokens)"
OF_CURVE = "15m"  # the curve is of at least so much time

TOKENS = SELECTION.rate(REUSE_DISTANCE, part="_count")
_BY_SOURCE = "prompt_tokens_by_source_total"


def reuse() -> Section:
    """Return the section of the board *Connector*."""
    lines_of_panels = [(9, [(12, _curve()), (12, _parts())]), (9, [(8, _held()), (8, _evicted()), (8, _missed())])]
    return Section("Reuse: what a cache could serve", lines_of_panels, collapsed=True)


def hits_by_size() -> str:
    """Return the share of the prompts' blocks that an LRU cache of each size, the label ``le``, would serve."""
    within = SELECTION.rate(REUSE_DISTANCE, "le", part="_bucket", le="[0-9].*|0")  # without +Inf
    return ratio(within, f"0 * {within} + on () group_left () {TOKENS}")


def hits_of_vllm() -> str:
    """Return the share of prompts that vLLM's cache served, with its size as the label ``le``."""
    hits = ratio(VLLM.vllm_rate(_BY_SOURCE, matching='source="local_cache_hit"'), VLLM.vllm_rate("prompt_tokens_total"))
    sizes = f'count_values("le", {SELECTION.series(signals.LOCAL_CACHE_TOKENS)})'
    return f"max by (le) (0 * {sizes} + on () group_left () ({hits}))"


def hits_of_connectors() -> str:
    """Return the share of prompts that vLLM's cache and each connector of a stated size served, at that size.

    No connector is asked for what vLLM serves itself, even if it also has it.
    """
    local = VLLM.vllm_rate(_BY_SOURCE, matching='source="local_cache_hit"')
    loads = SELECTION.rate(signals.LOAD_TOKENS, "connector")
    shares = ratio(
        f"({loads} + on () group_left () ({local} or 0 * {TOKENS}))", f"0 * {loads} + on () group_left () {TOKENS}"
    )
    sizes = f'count_values by (connector) ("le", {SELECTION.series(signals.CAPACITY_TOKENS)})'
    return f"max by (le, connector) (0 * {sizes} + on (connector) group_left () ({shares}))"


def computed_tokens() -> tuple[str, str]:
    """Return computed tokens per second: those used for the first time, and those used before.

    With prefill elsewhere tokens are loaded that this engine never saw: these are not computed.
    """
    hits, loaded = (
        VLLM.vllm_rate(_BY_SOURCE, matching=f'source=~"{sources}"')
        for sources in ("local_cache_hit|external_kv_transfer", "external_kv_transfer")
    )
    loadable = SELECTION.rate(signals.LOADABLE_TOKENS)
    again = f"(clamp_min({loadable} - {loaded}, 0) or {loadable})"
    return f"clamp_min({TOKENS} - ({hits} or 0 * {TOKENS}) - ({again} or 0 * {TOKENS}), 0)", again


def _curve() -> Panel:
    # Each series has the name of its bars as the label ``cache``, and no other label but the size.
    of_connectors = f'label_replace({hits_of_connectors()}, "cache", "with $1, measured", "connector", "(.*)")'
    queries = [
        f'label_replace({hits_by_size()}, "cache", "an LRU cache of this size", "", "")',
        f'label_replace({hits_of_vllm()}, "cache", "vLLM\'s own cache, measured", "", "")',
        f"max by (le, cache) ({of_connectors})",
    ]
    about = About(
        "Share of the prompts' tokens that an LRU cache of each size would serve, and what vLLM's own cache served, "
        "alone and with each connector of known size.",
        "Size a connector's memory by the step to the right of vLLM's bar; for a measured bar far below its "
        "neighbours see KvobsNeverServes in the runbook.",
    )
    panel = (
        board.Panel()
        .type("barchart")
        .title("Hit share by cache size")
        .description(about.text(queries))
        .datasource(PROMETHEUS)
        .interval(OF_CURVE)
        .unit("percentunit")
        .min(0)
        .max(1)
        .no_value(looks.NO_TRAFFIC)
        .options({"xField": SIZE, "showValue": "never", "xTickLabelSpacing": 60, "legend": {"showLegend": True}})
        .override_by_name(SIZE, [model.DynamicConfigValue(id_val="unit", value="short")])
    )
    for index, expr in enumerate(queries):
        query = prometheus.Dataquery().datasource(PROMETHEUS).expr(expr).ref_id(ref_id(index)).instant()
        panel.with_target(query.format(prometheus_model.PromQueryFormat.TIME_SERIES))
    for id_val, options in {
        "labelsToFields": {"valueLabel": "cache"},
        "merge": {},
        "convertFieldType": {"conversions": [{"targetField": "le", "destinationType": "number"}], "fields": {}},
        "sortBy": {"fields": {}, "sort": [{"field": "le"}]},
        "organize": {"excludeByName": {"Time": True}, "renameByName": {"le": SIZE}},
    }.items():
        panel.with_transformation(model.DataTransformerConfig(id_val=id_val, options=options))
    return panel


def _parts() -> Panel:
    new, again = computed_tokens()
    return lines(
        "Where prompts' tokens came from (tokens/s)",
        About(
            "Prompt tokens per second by where they came from: vLLM's own cache, each connector, or computed, at "
            "first use or although they were used before.",
            "With many 'used before' compare the curve with the sizes of your caches, then see 'Offered tokens not "
            "loaded'.",
        ),
        Query(VLLM.vllm_rate(_BY_SOURCE, matching='source="local_cache_hit"'), "vLLM's own cache", looks.VLLM),
        of_connector(SELECTION.rate(signals.LOAD_TOKENS, "connector")),
        Query(new, "computed: first use"),
        Query(again, "computed: used before", looks.BAD),
        Query(SELECTION.rate(signals.PROMPT_TAIL_TOKENS), "no full block"),
        unit="short",
        stacked=True,
    )


def _held() -> Panel:
    return lines(
        "Tokens in each store; its size (dashed)",
        About(
            "Tokens that each medium of a connector holds, by its KV cache events; its size (dashed); and what stores "
            "themselves report, each in its own unit.",
            "A full store evicts: see the panel to the right; a connector without such events shows only what its "
            "store reports.",
        ),
        Query(SELECTION.gauge(signals.STORED_TOKENS, "connector", "medium"), "{{connector}} {{medium}}"),
        Query(SELECTION.gauge(signals.CAPACITY_TOKENS, "connector"), "{{connector}} size", dashed=True),
        *stores.held(),
        unit="short",
    )


def _evicted() -> Panel:
    return lines(
        "Tokens saved and evicted (tokens/s)",
        About(
            "Tokens per second saved and evicted (dashed), by KV cache events, the share of evicted ones that prompts "
            "ask for again, and what stores themselves evict or refuse.",
            "If that share is high, a larger store would serve it: see the curve for how large.",
        ),
        Query(SELECTION.rate(signals.SAVE_TOKENS, "connector", "medium"), "{{connector}} {{medium}} saved"),
        Query(
            SELECTION.rate(signals.EVICTED_TOKENS, "connector", "medium"),
            "{{connector}} {{medium}} evicted",
            dashed=True,
        ),
        Query(
            evicted_too_early("connector", "medium"),
            "{{connector}} {{medium}} evicted, then asked for",
            looks.BAD,
            unit="percentunit",
        ),
        *stores.evicted(),
        unit="short",
    )


def _missed() -> Panel:
    return lines(
        "Tokens not offered, by reason (tokens/s)",
        About(
            "Prompt tokens per second that a connector was asked for and did not offer, by reason; an estimate of "
            "what this engine has seen.",
            "With many evicted tokens enlarge the store; with not_stored ones see KvobsNeverServes in the runbook.",
        ),
        Query(SELECTION.rate(signals.MISSED_TOKENS, "connector", "reason"), "{{connector}} {{reason}}"),
        unit="short",
        stacked=True,
        colors=looks.BY_REASON,
    )
