"""The three layers, each behind a network: features of shape (batch, 6, 2) give a number per item."""

import torch
from torch import nn

import riskfield as rf

GRID = rf.grid(2, 3, num_states=2, tied=True)
TRUNCATED = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(3, tol=None))


class Marginals(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.pairwise = nn.Parameter(torch.randn(2, 2, 2))
        self.marginals = rf.nn.MarginalInference(GRID, TRUNCATED)

    def forward(self, features):
        mu, value = self.marginals(GRID.assemble([self.linear(features)], [self.pairwise]), log_partition=True)
        return mu[..., :3].log().sum(-1) + value


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.crf = rf.nn.LinearChainCRF(2, batch_first=True)
        self.lengths = torch.tensor([6, 4, 5, 2])

    def forward(self, features):
        tags = (features[..., 0] > 0).long()
        mask = torch.arange(6) < self.lengths[: len(features), None]
        return self.crf(self.linear(features), tags, mask, reduction="none")


class Grid(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.crf = rf.nn.GridCRF(2, contrast=True)

    def forward(self, features):
        logits = self.linear(features).transpose(1, 2).unflatten(2, (2, 3))
        return self.crf(logits, features[..., :1].transpose(1, 2).unflatten(2, (2, 3)))[:, 0].sum((1, 2))


def made(make):
    torch.manual_seed(0)
    model = make()
    return model, torch.randn(4, 6, 2)
