"""
Learn with hidden variables
===========================

Labels of -1 are unknown. ``SurrogateEM`` maximises the likelihood of the known ones and sums the others out. Here
only a tenth of the labels of each sequence is known.
"""

import matplotlib.pyplot as plt
import torch

import riskfield as rf

torch.manual_seed(0)
graph = rf.chain(40, num_states=3, tied=True)


def sequences(number):
    """States that stay, or move on to the next one, and noisy measurements."""
    states = (torch.rand(number, 40) < 0.25).cumsum(1) % 3
    measured = states + 0.9 * torch.randn(number, 40)
    nodes = torch.stack([torch.ones_like(measured), measured, measured**2], -1).double()
    return states, nodes


states, nodes = sequences(60)
test_states, test_nodes = sequences(200)
known = torch.where(torch.rand(60, 40) < 0.1, states, -1)
print(f"{(known >= 0).double().mean():.0%} of the labels are known")

# %%
# Train on the known labels alone, and with the others summed out.

inference = rf.Inference(rf.MessagePassing(), rf.Stop(sweeps=1, tol=1.0), rf.Envelope())  # one sweep is exact
errors, tables = {}, {}
for name, loss in {
    "known labels alone": rf.losses.Independent(),
    "hidden labels summed out": rf.losses.SurrogateEM(),
}.items():
    model = rf.Conditional(torch.nn.Linear(3, 3, dtype=torch.float64), rf.models.Tables(1, 3, 3))
    data = rf.Examples(graph, known, {"nodes": nodes})
    rf.fit(model, data, loss, inference, ridge=1e-4, optimiser=rf.optim.LBFGS(iterations=25))
    with torch.no_grad():
        found = inference(graph, model(graph, {"nodes": test_nodes})).mode()
    errors[name] = float((found != test_states).double().mean())
    tables[name] = graph.factor_views(model(graph, {"nodes": nodes[:1]}).detach()[0])[0][0].softmax(-1)
    print(f"{name}: {errors[name]:.1%} of the test labels are wrong")

# %%
# From so few labels, neighbours that are both known are rare, but the table of transitions is found.

figure, axis = plt.subplots(figsize=(4, 3.4), layout="constrained")
shown = axis.imshow(tables["hidden labels summed out"].numpy(), cmap="Blues", vmin=0, vmax=1)
axis.set(
    xlabel="next state", ylabel="state", xticks=range(3), yticks=range(3), title="softmax of each row of the table"
)
figure.colorbar(shown)
