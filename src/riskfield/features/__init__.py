"""Features of pictures, the inputs of models."""
