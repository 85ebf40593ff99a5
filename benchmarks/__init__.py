"""Time and memory of per-sample gradients beside the ordinary batch gradient: `python -m benchmarks`."""
