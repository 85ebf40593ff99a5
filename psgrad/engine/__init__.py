"""One run of `fn` over all samples: a vmapped forward under a mode, an ordinary backward, factors collected."""
