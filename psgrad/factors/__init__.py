"""Factors: per-sample gradients before they are written out, and the sums, norms and products made of them."""
