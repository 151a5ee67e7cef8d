"""`riskfield reproduce`: the experiments of the papers, a command in each module."""

from riskfield.cli.reproduce import backgrounds, convex, denoising, erm, gradients, horses, misspecification
from riskfield.cli.reproduce._app import app

__all__ = ["app", "backgrounds", "convex", "denoising", "erm", "gradients", "horses", "misspecification"]
