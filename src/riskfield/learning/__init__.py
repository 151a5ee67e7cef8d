"""Fitting parameters: the loop over data, optimisers, checkpoints, several machines."""
