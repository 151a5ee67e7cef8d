"""
Train for the F-measure
=======================

The F-measure is the harmonic mean of precision and recall. Its decoder, ``EqualCount``, labels the variables with the
larger marginals as positive. Here one model is trained by likelihood, and then for the F-measure, through a soft
version of the decoder (Stoyanov, Ropson and Eisner, 2011).
"""

import matplotlib.pyplot as plt
import torch

import riskfield as rf

torch.manual_seed(0)
graph = rf.chain(30, num_states=2)


def sequences(number):
    """Long spells, and features in which a few outliers dominate."""
    states = (torch.rand(number, 30) < 0.2).cumsum(1) % 2
    feature = 2.0 * states - 1 + torch.distributions.StudentT(1.5).sample((number, 30))
    ones = torch.ones(number, 29, 1, dtype=torch.float64)
    nodes = torch.stack([torch.ones(number, 30), feature], -1).double()
    return rf.Examples(graph, states, {"nodes": nodes, "factors": ones})


train, test = sequences(60), sequences(300)

# %%
# Start from the likelihood, then train for F.

inference = rf.Inference(rf.MessagePassing(), rf.Stop(sweeps=1, tol=None), rf.Unroll())  # exact on a chain
model = rf.LinearModel(num_states=2, node_features=2, factor_features=1)
settings = {"ridge": 1e-4, "progress": False, "optimiser": rf.optim.LBFGS(iterations=20)}
scores = {}
for name, loss in {
    "likelihood": rf.losses.SurrogateLikelihood(),
    "F-measure": rf.losses.FMeasure(rf.decoders.SoftEqualCount(0.5)),
}.items():
    rf.fit(model, train, loss, inference, **settings)
    (predicted,) = rf.predict(model, test, inference, rf.decoders.EqualCount())
    scores[name] = [rf.metrics.f_measure(own, truth) for own, truth in zip(predicted, test.labels, strict=True)]
    print(f"trained by {name}: mean F {sum(scores[name]) / len(scores[name]):.3f}")

# %%

figure, axis = plt.subplots(figsize=(5.5, 3.2), layout="constrained")
axis.hist(list(scores.values()), bins=12, label=[f"trained by {name}" for name in scores])
axis.set(xlabel="F-measure of a test sequence", ylabel="sequences", title="F-measure by training loss")
axis.legend(frameon=False)
