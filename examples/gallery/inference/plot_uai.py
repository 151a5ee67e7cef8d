"""
Read a model in UAI format
==========================

Files of the UAI inference competitions hold variables, factors and tables. This example writes a small Bayesian
network in that format, reads it, and computes marginals with and without evidence. ``riskfield infer`` does the same
on the command line.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import riskfield as rf

# %%
# Rain (0) and the sprinkler (1) make the grass (2) wet. The sprinkler is rarely on when it rains.

TEXT = """
BAYES
3
2 2 2
3
1 0
2 0 1
3 0 1 2

2   0.8 0.2
4   0.6 0.4  0.99 0.01
8   1.0 0.0  0.1 0.9  0.2 0.8  0.01 0.99
"""
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "grass.uai"
    path.write_text(TEXT)
    model = rf.io.read_uai(path)

# %%
# Three questions.

questions = {"nothing observed": {}, "the grass is wet": {2: 1}, "wet, and the sprinkler is on": {1: 1, 2: 1}}
rain = {}
for name, evidence in questions.items():
    solution = rf.infer(model.graph, model.theta, rf.Exact(), evidence=evidence)
    rain[name] = float(model.graph.node(solution.mu, 0)[1])
    print(f"{name}: P(rain) = {rain[name]:.3f}")

# %%
# That the sprinkler is on explains away the rain: the grass is wet anyway, so rain becomes improbable.

figure, axis = plt.subplots(figsize=(6, 2.2), layout="constrained")
axis.barh(list(rain), list(rain.values()), height=0.6)
axis.invert_yaxis()
axis.set(xlim=(0, 1), xlabel="P(rain)", title="Rain, by what is observed")
