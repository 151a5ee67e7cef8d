"""Models of pgmpy: read by their methods, from stand-ins with the same ones, and with the package where it is there."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield.io import from_pgmpy, to_pgmpy


class Factor:
    """As `pgmpy.factors.discrete.DiscreteFactor`, and `TabularCPD` with its variable first."""

    def __init__(self, variables, cardinality, values, state_names=None):
        self.variables, self.cardinality = list(variables), np.array(cardinality)
        self.values = np.asarray(values, float).reshape(cardinality)
        self.state_names = state_names or {v: list(range(n)) for v, n in zip(variables, cardinality, strict=True)}


class Network:
    """As `pgmpy.models.DiscreteMarkovNetwork`."""

    def __init__(self, nodes=(), factors=()):
        self.nodes, self.edges, self.factors = list(nodes), [], list(factors)

    def get_factors(self):
        return self.factors

    def add_nodes_from(self, nodes):
        self.nodes += nodes

    def add_edges_from(self, edges):
        self.edges += edges

    def add_factors(self, *factors):
        self.factors += factors


YES_NO = ["no", "yes"]
MARKOV = Network(
    ["c", "a", "b"],
    [
        Factor(["a", "b"], [2, 3], range(1, 7), {"a": YES_NO, "b": ["x", "y", "z"]}),
        Factor(["c", "b"], [2, 3], [3, 1, 2, 1, 0, 5], {"c": [0, 1], "b": ["x", "y", "z"]}),
        Factor(["a"], [2], [2, 1], {"a": YES_NO}),
    ],
)
SPRINKLER = SimpleNamespace(
    nodes=["rain", "sprinkler", "wet"],
    get_cpds=lambda: [
        Factor(["rain"], [2], [0.8, 0.2], {"rain": YES_NO}),
        Factor(["sprinkler"], [2], [0.6, 0.4]),
        Factor(
            ["wet", "rain", "sprinkler"],
            [2, 2, 2],
            [0.99, 0.3, 0.1, 0.01, 0.01, 0.7, 0.9, 0.99],
            {"wet": YES_NO, "rain": YES_NO, "sprinkler": [0, 1]},
        ),
    ],
)


def by_einsum(observed_b=None):
    """P(a, b, c) of MARKOV, unnormalised."""
    first, second, third = (own.values for own in MARKOV.factors)
    joint = np.einsum("ab,cb,a->abc", first, second, third)
    return joint if observed_b is None else joint[:, observed_b : observed_b + 1]


def test_a_markov_network():
    model = from_pgmpy(MARKOV)
    assert list(model.graph.names) == ["c", "a", "b"]
    assert model.states == {"a": ("no", "yes"), "b": ("x", "y", "z"), "c": (0, 1)}
    solution = rf.infer(model.graph, model.theta, rf.Exact())
    joint = by_einsum()
    assert solution.log_partition.exp().item() == pytest.approx(joint.sum())
    for name, axes in (("a", (1, 2)), ("b", (0, 2)), ("c", (0, 1))):
        found = model.graph.node(solution.mu, model.graph.variable(name))
        np.testing.assert_allclose(found, joint.sum(axes) / joint.sum())
    given = rf.infer(model.graph, model.theta, rf.Exact(), evidence=model.evidence({"b": "z"}))
    one = by_einsum(2)
    np.testing.assert_allclose(
        model.graph.node(given.mu, model.graph.variable("a")), one.sum((1, 2)) / one.sum(), rtol=1e-12
    )
    with pytest.raises(ValueError, match=r"`b` must be one of 'x', 'y', 'z'\. Got 'w'"):
        model.evidence({"b": "w"})


def test_a_bayesian_network():
    model = from_pgmpy(SPRINKLER)
    solution = rf.infer(model.graph, model.theta, rf.Exact(), evidence=model.evidence({"wet": "yes"}))
    assert rf.infer(model.graph, model.theta, rf.Exact()).log_partition.item() == pytest.approx(0, abs=1e-12)
    rainy, dry = 0.2 * (0.6 * 0.9 + 0.4 * 0.99), 0.8 * (0.6 * 0.01 + 0.4 * 0.7)
    rain = model.graph.node(solution.mu, model.graph.variable("rain"))
    assert rain[1].item() == pytest.approx(rainy / (rainy + dry))


def test_a_factor_graph():
    factor = MARKOV.factors[0]
    graph = SimpleNamespace(
        nodes=["a", factor, "b"], get_factors=lambda: [factor], get_variable_nodes=lambda: ["a", "b"]
    )
    model = from_pgmpy(graph)
    assert (model.graph.num_variables, model.graph.num_factors) == (2, 1)
    torch.testing.assert_close(model.graph.factor(model.theta, 0).exp(), torch.from_numpy(factor.values))


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (object(), TypeError, "`model` must be a DiscreteMarkovNetwork, .* Got object"),
        (SimpleNamespace(nodes=["a"], get_cpds=lambda: [SimpleNamespace()]), TypeError, "`model` must be discrete"),
        (Network(["a", "b"], [Factor(["a"], [2], [1, 1])]), ValueError, "Variable 'b' has none"),
        (
            Network(["a"], [Factor(["a"], [2], [1, -1])]),
            ValueError,
            r"factor of \['a'\] has other values",
        ),
        (
            Network(["a"], [Factor(["a"], [2], [1, 1]), Factor(["a"], [3], [1, 1, 1])]),
            ValueError,
            "must give 'a' the same states in all factors",
        ),
        (
            SimpleNamespace(nodes=SPRINKLER.nodes, get_cpds=lambda: SPRINKLER.get_cpds()[1:]),
            ValueError,
            "`model` must have a CPD for every variable. Variable 'rain' has none",
        ),
        (Network([("a",)], [Factor(["a"], [2], [1, 1])]), ValueError, r"Variable \('a',\) has none"),
    ],
)
def test_refusals(model, error, message):
    with pytest.raises(error, match=message):
        from_pgmpy(model)


@pytest.fixture
def stand_in(monkeypatch):
    """The two names of pgmpy that `to_pgmpy` uses."""
    for name, own in (("models", {"DiscreteMarkovNetwork": Network}), ("factors.discrete", {"DiscreteFactor": Factor})):
        module = ModuleType(f"pgmpy.{name}")
        vars(module).update(own)
        monkeypatch.setitem(sys.modules, f"pgmpy.{name}", module)
    for name in ("pgmpy", "pgmpy.factors"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_there_and_back(stand_in):
    graph = rf.FactorGraph([2, 3, 2, 2], [(0, 1), (2, 1, 0)], names=["a", "b", "c", "d"])
    theta = torch.linspace(-1, 2, graph.theta_size, dtype=torch.float64)
    graph.node(theta, 1)[:] = 0  # says nothing
    graph.node(theta, 3)[:] = torch.tensor([0.0, -torch.inf])  # is in no factor
    written = to_pgmpy(graph, theta, {"a": YES_NO})
    assert [own.variables for own in written.factors] == [["a", "b"], ["c", "b", "a"], ["a"], ["c"], ["d"]]
    assert set(written.edges) >= {("a", "b"), ("c", "b"), ("c", "a"), ("b", "a")}
    again = from_pgmpy(written)
    assert again.states["a"] == ("no", "yes")
    before, after = rf.infer(graph, theta, rf.Exact()), rf.infer(again.graph, again.theta, rf.Exact())
    torch.testing.assert_close(after.log_partition, before.log_partition)
    for k in range(4):
        torch.testing.assert_close(again.graph.node(after.mu, k), graph.node(before.mu, k))
    unnamed = to_pgmpy(rf.chain(2, 2), rf.chain(2, 2).zeros())
    assert unnamed.nodes == ["x0", "x1"]
    with pytest.raises(ValueError, match=r"`states` must name variables of the graph\. Got 'q'"):
        to_pgmpy(graph, theta, {"q": [0, 1]})
    with pytest.raises(ValueError, match="`theta` must be below 709"):
        to_pgmpy(graph, theta + 800)


def test_with_the_package():
    models, factors = pytest.importorskip("pgmpy.models"), pytest.importorskip("pgmpy.factors.discrete")
    inference = pytest.importorskip("pgmpy.inference")
    network = models.DiscreteMarkovNetwork([("a", "b"), ("b", "c")])
    own = [factors.DiscreteFactor(f.variables, f.cardinality, f.values, f.state_names) for f in MARKOV.factors]
    network.add_factors(*own)
    model = from_pgmpy(network)
    solution = rf.infer(model.graph, model.theta, rf.Exact())
    assert solution.log_partition.exp().item() == pytest.approx(network.get_partition_function())
    written = to_pgmpy(model.graph, model.theta, model.states)
    assert written.check_model()
    assert written.get_partition_function() == pytest.approx(network.get_partition_function())
    asked = inference.VariableElimination(written).query(["a"], evidence={"b": "x"}, show_progress=False)
    asked.normalize()
    given = rf.infer(model.graph, model.theta, rf.Exact(), evidence=model.evidence({"b": "x"}))
    np.testing.assert_allclose(model.graph.node(given.mu, model.graph.variable("a")), asked.values, rtol=1e-9)
    bayes = models.DiscreteBayesianNetwork([("rain", "wet"), ("sprinkler", "wet")])
    for cpd in SPRINKLER.get_cpds():
        parents = cpd.variables[1:]
        table = cpd.values.reshape(2, -1)
        bayes.add_cpds(
            factors.TabularCPD(cpd.variables[0], 2, table, parents, [2] * len(parents), state_names=cpd.state_names)
        )
    read = from_pgmpy(bayes)
    given = rf.infer(read.graph, read.theta, rf.Exact(), evidence=read.evidence({"wet": "yes"}))
    asked = inference.VariableElimination(bayes).query(["rain"], evidence={"wet": "yes"}, show_progress=False)
    np.testing.assert_allclose(read.graph.node(given.mu, read.graph.variable("rain")), asked.values, rtol=1e-9)
