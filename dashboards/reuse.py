"""Panels about reuse: what a cache of any size would serve, where tokens came from, what stores hold and forget."""

from __future__ import annotations

from dashboards import looks, stores
from dashboards.frame import Section
from dashboards.panels import PROMETHEUS, About, Panel, Query, lines, of_connector, ref_id
from dashboards.promql import ratio, share
from dashboards.questions import SELECTION, VLLM
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


def evicted_too_early() -> str:
    """Return the share of evicted tokens that prompts asked for before they were stored again."""
    followed = SELECTION.rate(signals.FOLLOWED_EVICTIONS, "connector", "medium")
    return share(SELECTION.rate(signals.REUSED_EVICTIONS, "connector", "medium"), followed)


def _curve() -> Panel:
    # Each series has the name of its bars as the label ``cache``, and no other label but the size.
    of_connectors = f'label_replace({hits_of_connectors()}, "cache", "with $1, measured", "connector", "(.*)")'
    queries = [
        f'label_replace({hits_by_size()}, "cache", "an LRU cache of this size", "", "")',
        f'label_replace({hits_of_vllm()}, "cache", "vLLM\'s own cache, measured", "", "")',
        f"max by (le, cache) ({of_connectors})",
    ]
    about = About(
        "Share of the prompts' tokens that an LRU cache of each size would serve; next to it, the share that vLLM's "
        "own cache served, at its size, and the share that it served together with each connector whose options "
        "state a size, at that size.",
        "All bars near 0: prompts do not repeat, and no cache helps. Flat to the right of vLLM's bar: more memory "
        "does not help. A step to the right of it: a cache of that size would serve that much more.",
        "Size a connector's memory by the step. A measured bar far below its neighbours: blocks are held by requests "
        "or transfers, were not stored, were not waited for, or the cache was reset.",
        "Sizes are for one engine, in tokens: a cache that several engines share sees the prompts of all of them. An "
        "estimate.",
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
            "Prompt tokens per second: in vLLM's own cache, loaded by each connector, computed because they were "
            "used for the first time, computed although they were used before, and tokens that no cache can serve.",
            "The parts add up to the prompts. 'used before': evicted, not stored, not waited for, declined or failed.",
            "Many 'used before': compare the curve with the sizes of your caches, then see the row Gain for tokens "
            "that were offered but not loaded.",
            "Without vLLM's own metrics, its hits count as computed at first use. Loads count again after a "
            "preemption.",
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
            "Tokens that each medium of a connector holds, by its KV cache events, and the size that its options "
            "state (dashed). Then what stores themselves report, each in its unit.",
            "At its size a store is full, and evicts: see the panel to the right.",
            "No tokens: switch events on (docs/metrics.md). Far below its size for hours: it is larger than the "
            "traffic needs, or does not store what it should.",
            "A share that vLLM reports is of memory in transfers, not of memory in use: a full store may show 0. "
            "Tokens are absent where events do not report evictions.",
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
            "Tokens per second that the connector stored in each medium, and evicted from it (dashed), according to "
            "its KV cache events; and the share of evicted tokens that prompts ask for again.",
            "Both lines alike: the store is full, and each token takes the place of another. Saves fill and wear a "
            "disk or a remote store; a token in memory and on disk counts in both.",
            "Evicted, then asked for: a larger store would have served that share; see the curve for how large. Saved "
            "far above the tokens that are computed: blocks are stored again and again.",
            "No data: the connector does not report it, or vLLM's --kv-events-config is off. The share is an estimate, "
            "and does not count what vLLM's own cache has.",
        ),
        Query(SELECTION.rate(signals.SAVE_TOKENS, "connector", "medium"), "{{connector}} {{medium}} saved"),
        Query(
            SELECTION.rate(signals.EVICTED_TOKENS, "connector", "medium"),
            "{{connector}} {{medium}} evicted",
            dashed=True,
        ),
        Query(evicted_too_early(), "{{connector}} {{medium}} evicted, then asked for", looks.BAD, unit="percentunit"),
        *stores.evicted(),
        unit="short",
    )


def _missed() -> Panel:
    return lines(
        "Tokens not offered, by reason (tokens/s)",
        About(
            "Prompt tokens per second that a connector was asked for and did not offer, by reason.",
            "never_seen, beyond_prefix: used for the first time, and no store has them. no_full_block: less than a "
            "block or chunk. other_connector: another one offers them.",
            "evicted: a larger store. not_stored: it was seen here, and the connector never stored it, or lost it: see "
            "'Why was it a miss?' in docs/capacity.md.",
            "An estimate, and of what this engine has seen: another engine may have stored what is never_seen here. "
            "Without KV cache events, evicted counts as not_stored.",
        ),
        Query(SELECTION.rate(signals.MISSED_TOKENS, "connector", "reason"), "{{connector}} {{reason}}"),
        unit="short",
        stacked=True,
        colors=looks.BY_REASON,
    )
