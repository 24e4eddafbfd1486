"""Run a real vLLM server on a CPU with kvobs and two real KV connectors, on a model made on the spot.

``kvobs demo`` runs on these modules, and the tests on real engines also use them.
"""
