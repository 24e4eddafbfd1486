"""Predict the time of computing and of loading; choose between them."""
