"""Import grafana-foundation-sdk, whose classes for classic boards warn, while they are imported, that v2 is to come."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "Prefer using dashboardv2", DeprecationWarning)
    from grafana_foundation_sdk.builders import common as build
    from grafana_foundation_sdk.builders import dashboard as board
    from grafana_foundation_sdk.builders import heatmap, prometheus, stat, statetimeline, table, tempo, timeseries
    from grafana_foundation_sdk.cog.builder import Builder
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common, units
    from grafana_foundation_sdk.models import dashboard as model
    from grafana_foundation_sdk.models import heatmap as heatmap_model
    from grafana_foundation_sdk.models import prometheus as prometheus_model
    from grafana_foundation_sdk.models import tempo as tempo_model

__all__ = [
    "Builder",
    "JSONEncoder",
    "board",
    "build",
    "common",
    "heatmap",
    "heatmap_model",
    "model",
    "prometheus",
    "prometheus_model",
    "stat",
    "statetimeline",
    "table",
    "tempo",
    "tempo_model",
    "timeseries",
    "units",
]
