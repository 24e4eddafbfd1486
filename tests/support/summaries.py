"""A summary of the demo, as pages show it."""

from dataclasses import replace

from kvobs.cli.summary.rows import PromptTokens, ServerSums, connector_sums
from kvobs.export.numbers import Numbers

_CPU = replace(
    connector_sums("cpu", Numbers()), lookups=96, hits=8, hit_share=8 / 96, offered_tokens=7168, loaded_tokens=7168,
    loaded_bytes=29_400_000, bytes_per_s=117e6, loads=8, load_p50_s=0.034, load_p99_s=0.041, load_mean_s=0.031,
    load_stall_s=51e-6, save_stall_s=0.0012, estimated_loads=4, saved_s=0.452, waited_s=0.125, scheduler_s=0.051,
)  # fmt: skip
_DISK = replace(
    _CPU, connector="disk", hits=48, hit_share=0.5, offered_tokens=11904, lost_tokens=384, loaded_tokens=7936,
    loaded_bytes=32_500_000, bytes_per_s=307.2e6, loads=44, load_p50_s=0.0018, load_p99_s=0.0072, load_mean_s=0.0024,
    load_stall_s=0.106, save_stall_s=0.21, estimated_loads=40, saved_s=0.501, waited_s=0.096, scheduler_s=0.088,
)  # fmt: skip
DEMO = ServerSums(
    "tiny at port 8000", "tiny", "0.32.0", "0.2.0", 13.0, connectors=(_CPU, _DISK),
    prompt_tokens=PromptTokens(10_484, 71_476, {"cpu": 7168, "disk": 7936}),
)  # fmt: skip
