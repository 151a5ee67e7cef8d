"""Models: theta from inputs and learned parameters, as torch modules."""
