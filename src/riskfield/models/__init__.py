"""Models: torch modules that compute theta from inputs and learned parameters."""
