"""Predict the time of computing, and learn at which distances prompts repeat."""

from kvobs.prediction.compute_cost import ComputeCost, Work
from kvobs.prediction.reuse import Reuse, ReuseDistances, key_of

__all__ = ["ComputeCost", "Reuse", "ReuseDistances", "Work", "key_of"]
