"""Small learning problems that several tests share. Everything in them comes from a seed."""

from __future__ import annotations

import torch
from torch.nn import functional

import riskfield as rf

CHAIN = rf.chain(5, 3, tied=True)
EXACT = rf.Inference(rf.Exact())
TRUNCATED = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(4, tol=None), rf.Unroll())


def chain_examples(number=30, *, seed=0, graph=CHAIN, features=4):
    """Noisy labels of the strongest of three random projections of the features."""
    generator = torch.Generator().manual_seed(seed)
    projection = torch.randn(features, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    inputs = torch.randn(number, graph.num_variables, features, generator=generator, dtype=torch.float64)
    noise = torch.randn(number, graph.num_variables, 3, generator=generator, dtype=torch.float64)
    return rf.Examples(graph, (inputs @ projection + noise).argmax(-1), {"nodes": inputs})


def chain_model(features=4, *, seed=None):
    """Linear in the features, one table for all neighbours; all zero, or random from a seed."""
    model = rf.Conditional(torch.nn.Linear(features, 3, dtype=torch.float64), rf.models.Tables(1, 3, 3))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if generator is None:
                parameter.zero_()
            else:
                parameter.normal_(generator=generator)
    return model


def denoising(number=20, *, side=12, seed=0):
    """Blobs seen through the noise of Domke (2013, section 8.2), n = 1.25; features are a constant and the pixel."""
    generator = torch.Generator().manual_seed(seed)
    graph = rf.grid(side, side, 2)
    field = torch.randn(number, 1, side + 6, side + 6, generator=generator, dtype=torch.float64)
    labels = (functional.avg_pool2d(field, 7, stride=1) > 0).long().reshape(number, -1)
    t = torch.rand(number, side * side, generator=generator, dtype=torch.float64) ** 1.25
    y = labels * (1 - t) + (1 - labels) * t
    edges = torch.zeros(number, graph.num_factors, 2, dtype=torch.float64)
    horizontal = side * (side - 1)
    edges[:, :horizontal, 0] = edges[:, horizontal:, 1] = 1
    return rf.Examples(graph, labels, {"nodes": torch.stack([torch.ones_like(y), y], -1), "factors": edges})


def values(model):
    """All parameters in one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
