"""Many processes: what the ranks of a torch.distributed group do together, and how they agree on errors.

Nothing here runs inside `fn`, and nothing at all where no group is given.
"""
