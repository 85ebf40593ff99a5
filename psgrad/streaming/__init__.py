"""Samples a chunk at a time, and how large a chunk fits a bound on memory."""
