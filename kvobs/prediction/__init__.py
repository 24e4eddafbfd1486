"""Predict the time of computing, and learn at which distances prompts repeat."""

from kvobs.prediction.compute_cost import ComputeCost, Work
from kvobs.prediction.reuse import ReuseDistances

__all__ = ["ComputeCost", "ReuseDistances", "Work"]
