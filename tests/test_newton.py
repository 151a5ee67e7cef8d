"""Newton's equations by elimination, against a dense solve; sparse factorisations, against dense inverses."""

import numpy as np
import pytest
import torch

import riskfield as rf
from riskfield.inference.convex import factorise
from riskfield.inference.convex.newton import Newton
from riskfield.inference.convex.polytope import Polytope
from strategies import potentials
from test_convex import MIXED, constraints

WAYS = pytest.mark.parametrize("band", [64, -1], ids=["band", "sparse"])


def numbers(graph, items, seed, spread):
    """Beliefs of tilted uniform regions, which lack something of every constraint, and curvatures of a wide range."""
    rng = np.random.default_rng(seed)
    b = Polytope(graph).uniform(torch.ones(items, graph.mu_size, dtype=torch.bool))
    b = b * torch.from_numpy(rng.uniform(0.9, 1.1, size=b.shape))
    curvature = torch.from_numpy(10.0 ** rng.uniform(-spread, spread, size=b.shape))
    return b, curvature, torch.from_numpy(rng.normal(size=b.shape))


def dense(graph, b, curvature, slope, possible):
    """x of H x + g = B^T y, B x = d - B b, with x = 0 where it must not move."""
    matrix, right = constraints(graph)
    free = possible.numpy()
    matrix = matrix[:, free]
    size, rows = matrix.shape[1], len(matrix)
    whole = np.block([[np.diag(curvature.numpy()[free]), -matrix.T], [matrix, np.zeros((rows, rows))]])
    found = np.linalg.lstsq(whole, np.concatenate([-slope.numpy()[free], right - matrix @ b.numpy()[free]]), rcond=None)
    out = np.zeros(graph.mu_size)
    out[free] = found[0][:size]
    return torch.from_numpy(out)


@WAYS
@pytest.mark.parametrize("tight", [False, True], ids=["reduced", "augmented"])
@pytest.mark.parametrize("graph", [MIXED, rf.grid(3, 4, 2), rf.grid(2, 3, 3)], ids=["mixed", "binary", "ternary"])
def test_steps_equal_a_dense_solve(graph, tight, band, monkeypatch):
    monkeypatch.setattr(factorise, "_BAND", band)
    polytope = Polytope(graph)
    b, curvature, slope = numbers(graph, 3, 0, 1.0)
    # Scaled so that all constraints can be kept: each region sums to the same.
    possible = torch.ones_like(b, dtype=torch.bool)
    newton = Newton(polytope, b, curvature, possible, tight=tight)
    found, solved = newton.solve(slope, polytope.missing(newton.b), 1e-12)
    assert solved.all()
    for k in range(3):
        expected = dense(graph, b[k], curvature[k], slope[k], possible[k])
        torch.testing.assert_close(found[k], expected, rtol=1e-9, atol=1e-10)


@WAYS
def test_impossible_states_do_not_move(band, monkeypatch):
    monkeypatch.setattr(factorise, "_BAND", band)
    theta = potentials(MIXED, 0)
    MIXED.factor(theta, 0)[0, 1] = MIXED.node(theta, 2)[0] = -torch.inf
    polytope = Polytope(MIXED)
    possible = polytope.consistent((theta > -torch.inf)[None])
    assert not possible.all()
    b, curvature, slope = numbers(MIXED, 1, 1, 1.0)
    b = torch.where(possible, b, 0.0)
    newton = Newton(polytope, b, curvature, possible)
    found, solved = newton.solve(slope, polytope.missing(newton.b), 1e-12)
    assert solved.all()
    expected = dense(MIXED, b[0], curvature[0], slope[0], possible[0])
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-10)
    assert (found[~possible] == 0).all()


def test_variables_that_are_all_but_bound_to_each_other():
    """All but nothing of each pair is in (0, 0) and (1, 1), around a loop."""
    graph = rf.FactorGraph([2, 2, 2], [(0, 1), (1, 2), (2, 0)])
    b = torch.full((1, graph.mu_size), 0.5, dtype=torch.float64)
    for f in range(3):
        graph.factor(b, f)[0, [0, 1], [1, 0]] = 1e-6 * (1 + f)
    curvature, slope, possible = 1 / b, potentials(graph, 2)[None], torch.ones_like(b, dtype=torch.bool)
    expected = dense(graph, b[0], curvature[0], slope[0], possible[0])
    tight = Newton(Polytope(graph), b, curvature, possible, tight=True)
    found, solved = tight.solve(slope, tight.polytope.missing(tight.b), 1e-10)
    assert solved.all()
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-8)
    # A step is as right as a step needs to be.
    step = Newton(Polytope(graph), b, curvature, possible).step(slope)
    torch.testing.assert_close(step[0], expected, rtol=0, atol=1e-6)


@WAYS
def test_factorisations_solve(band, monkeypatch):
    monkeypatch.setattr(factorise, "_BAND", band)
    rng = np.random.default_rng(0)
    rows, columns = np.tril_indices(12)
    kept = (rows == columns) | (rng.random(len(rows)) < 0.2)
    sparsity = factorise.Sparsity(12, rows[kept], columns[kept])
    assert sparsity.banded == (band > 0)
    values = rng.normal(size=kept.sum())
    values[sparsity.diagonal] = 10.0
    matrix = np.zeros((12, 12))
    matrix[rows[kept], columns[kept]] = matrix[columns[kept], rows[kept]] = values
    right = rng.normal(size=12)
    np.testing.assert_allclose(sparsity.factorise(values)(right), np.linalg.solve(matrix, right), rtol=1e-12)
    assert np.isnan(sparsity.factorise(np.zeros_like(values))(right)).all()


def test_a_polytope_does_not_keep_its_graph_alive():
    import gc
    import weakref

    graph = rf.grid(2, 2, 2)
    energy = rf.ConvexFreeEnergy([rf.inference.Term(rf.inference.SQUARE)])
    rf.infer(graph, graph.zeros(), energy)
    there = weakref.ref(graph)
    del graph
    gc.collect()
    assert there() is None
