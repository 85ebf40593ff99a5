"""The public functions: gradients, norms, sums, inner products, statistics, and the factors themselves."""
