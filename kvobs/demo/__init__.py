"""Run a real vLLM server on a CPU with kvobs and two real KV connectors, on a model made on the spot.

model.py          a tiny Llama with random weights and one token per byte
host_offload.py   lets vLLM's OffloadingConnector keep KV blocks in the memory of a machine without a GPU
serve.py          `vllm serve`, whatever vLLM's package is called here
server.py         start it, wait for it, talk to it, end it with all its children
processes.py      find and end every process of a session
serverlog.py      what vLLM's log says now, and the exception behind a failure
load.py           questions about a few documents, in rounds that make each child serve
collector.py      receive OpenTelemetry spans, over HTTP or gRPC
tree.py           one trace as a tree in the terminal
faults.py         what can be put wrong on purpose, and what tells of it
faulty.py         the connector that it is put into
report.py         what each child was asked, offered and loaded, out of two readings of /metrics
run.py            all of it, in order, in view

Product code: `kvobs demo` runs on these files, and the real-engine tests use them too.
"""
