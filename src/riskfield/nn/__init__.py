"""PyTorch layers: chains, grids, and inference on any graph."""

from riskfield.nn.grid import GridCRF
from riskfield.nn.linear_chain import LinearChainCRF
from riskfield.nn.marginal_inference import MarginalInference

__all__ = ["GridCRF", "LinearChainCRF", "MarginalInference"]
