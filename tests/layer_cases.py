"""The three layers, each behind a network: features of shape (batch, 6, 2) give a number per item.

`layer_cases.py STORE RANK` is one of two processes that train them together. It prints the parameters that it found.
"""

import sys

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


STEPS = 3


def train(model, features):
    """Steps on the mean over the items, which is the mean of the means over halves."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimiser.zero_grad()
        model(features).mean().backward()
        optimiser.step()


def parameters(models):
    """All parameters of some modules, in one tensor."""
    return torch.cat([own.detach().flatten() for model in models for own in model.parameters()])


def main():
    store, rank = sys.argv[1], int(sys.argv[2])
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    models = []
    for make in (Marginals, Chain, Grid):
        model, features = made(make)
        with torch.no_grad():
            for own in model.parameters():
                own += rank  # DistributedDataParallel begins with those of rank 0
        if isinstance(model, Chain):
            model.lengths = model.lengths[rank::2]
        train(nn.parallel.DistributedDataParallel(model), features[rank::2])
        models.append(model)
    torch.distributed.destroy_process_group()
    print(parameters(models).tolist())


if __name__ == "__main__":
    main()
