"""Run a real vLLM server on a CPU with kvobs and two real KV connectors, on a model made on the spot.

model.py              a tiny Llama with random weights and one token per byte
host_offload.py       lets vLLM's OffloadingConnector keep KV blocks in the memory of a machine without a GPU
vllm_serve.py         `vllm serve` for every package name of vLLM
server.py             start it, wait for it, send requests, end it with all its processes
processes.py          find and end every process of a process group
server_log.py         the newest message in vLLM's log, and the exception behind a failure
load.py               questions about a few documents, in rounds that make each connector serve
collector.py          receive OpenTelemetry spans
tree.py               one trace as a tree in the terminal
scenarios.py          the faults that can be injected, and the metrics that show them
faulty_connector.py   the connector with an injected fault
report.py             lookups, offers and loads of each connector between two readings of /metrics
run.py                the whole demo, step by step

Product code: `kvobs demo` runs on these files, and the real-engine tests use them too.
"""
