"""The program `python -m papers`: a command for each study, in a module of its name."""

from papers.commands import backgrounds, convex, denoising, erm, gradients, horses, misspecification
from papers.commands._app import app, main

__all__ = ["app", "backgrounds", "convex", "denoising", "erm", "gradients", "horses", "main", "misspecification"]
