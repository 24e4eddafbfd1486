"""Carry the numbers from the workers to the exporter: how payloads merge, and become objects again."""
