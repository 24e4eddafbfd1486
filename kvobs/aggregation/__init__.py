"""Combine the workers' outputs, rank by rank: a replacement of vLLM's ``KVOutputAggregator``."""

from kvobs.aggregation.aggregator import Aggregation, KVOutputAggregator, install, obstacle

__all__ = ["Aggregation", "KVOutputAggregator", "install", "obstacle"]
