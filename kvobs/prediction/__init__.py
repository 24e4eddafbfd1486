"""Predict the time of computing and of loading; choose between them."""

from kvobs.prediction.compute_cost import ComputeCost, StepTimes, Work, to_compute
from kvobs.prediction.load_choice import HANDED_OVER, Candidate, LoadChoice
from kvobs.prediction.reuse import ReuseDistances

__all__ = ["HANDED_OVER", "Candidate", "ComputeCost", "LoadChoice", "ReuseDistances", "StepTimes", "Work", "to_compute"]
