"""psgrad.compile: a quantity of one function, recorded as a graph and run from there."""
