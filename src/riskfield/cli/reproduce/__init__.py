"""`riskfield reproduce`: the experiments of the papers, a command in each module."""

from riskfield.cli.reproduce import convex, denoising, erm, gradients, misspecification
from riskfield.cli.reproduce._app import app

__all__ = ["app", "convex", "denoising", "erm", "gradients", "misspecification"]
