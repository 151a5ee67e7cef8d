"""One of two processes that train networks with CRF layers together: `ddp_worker.py STORE RANK`.

It prints the parameters that it found.
"""

import sys

import torch
from torch import nn

from layer_cases import Chain, Grid, Marginals, made

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
