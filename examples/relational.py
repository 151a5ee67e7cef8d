"""Who belongs to which club? A relational graph with hidden labels. `python examples/relational.py [--quick]`."""

import sys

import networkx
import torch

import riskfield as rf


def main(quick: bool) -> float:
    """Learn from the known members of Zachary's karate club, and return the share of the others that is right."""
    network = networkx.karate_club_graph()
    graph = rf.graph.from_networkx(network, num_states=2, tied=True)
    truth = torch.tensor([int(club == "Officer") for _, club in network.nodes(data="club")])
    known = torch.zeros(graph.num_variables, dtype=torch.bool)
    known[[0, 33, *range(0, graph.num_variables, 4)]] = True
    labels = torch.where(known, truth, -1)  # -1 is hidden: neither seen nor scored
    degrees = torch.tensor([float(degree) for _, degree in network.degree()], dtype=torch.float64)
    nodes = torch.stack([torch.ones_like(degrees), degrees / degrees.max()], 1)
    data = rf.Examples(graph, labels[None], {"nodes": nodes[None], "factors": torch.ones(1, 1, 1, dtype=torch.float64)})
    model = rf.LinearModel(2, node_features=2, factor_features=1)
    trw = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(sweeps=20, tol=None))
    optimiser = rf.optim.LBFGS(iterations=5 if quick else 50)
    rf.fit(model, data, rf.losses.Pseudolikelihood(), trw, ridge=0.1, optimiser=optimiser)
    # Prediction observes what is known; neighbours tell the rest.
    evidence = rf.Examples(graph, torch.full_like(labels, -1)[None], data.inputs, evidence=labels[None])
    (states,) = rf.predict(model, evidence, trw)
    right = float((states[0] == truth)[~known].float().mean())
    print(f"{int(known.sum())} members are known; of the other {int((~known).sum())}, {right:.0%} are right")
    return right


if __name__ == "__main__":
    main("--quick" in sys.argv)
