"""The program `python -m papers`: a command for each study. `pictures` has the commands of the studies of pictures."""

from papers.commands import convex, erm, gradients, misspecification, pictures
from papers.commands._app import app, main

__all__ = ["app", "convex", "erm", "gradients", "main", "misspecification", "pictures"]
