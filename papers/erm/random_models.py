r"""Random binary pairwise models and their data, as in section 5 of Stoyanov, Ropson & Eisner (2011).

Edges are picked at random; every entry of every pair's table is drawn from N(0, 1), or from a wider distribution. Of
the variables a third is input, a third hidden and a third output. The model that is trained, `GivenInputs`, is that of
all variables conditioned on the inputs: an edge to an input is a potential of its other end, so that inference runs on
the other variables alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import riskfield as rf

IntArray = npt.NDArray[np.int64]

_PER_CHAIN, _BURN_IN, _THINNING = 20, 500, 50  # for N(0, 1), checked by `sample_size`


class GivenInputs(nn.Module):
    """p(all other variables | input variables) of a binary pairwise model, with a table of parameters per edge.

    Edges between two inputs make no difference, and have no parameters.

    Arguments:
        num_variables: inputs included.
        edges: of shape (edge, 2).
        inputs: which variables are input.
    """

    def __init__(self, num_variables: int, edges: IntArray, inputs: IntArray):
        super().__init__()
        self.edges = edges
        is_input = np.zeros(num_variables, np.bool_)
        is_input[inputs] = True
        place = np.where(is_input, np.cumsum(is_input), np.cumsum(~is_input)) - 1
        ends = is_input[edges].sum(1)
        self.inner, mixed = np.flatnonzero(ends == 0), np.flatnonzero(ends == 1)
        first_is_input = is_input[edges[mixed, 0]]
        self.mixed = mixed
        self.graph = rf.from_edges(2, place[edges[self.inner]], num_variables=int((~is_input).sum()))
        self.num_inputs = int(is_input.sum())
        self.others = np.flatnonzero(~is_input)  # the variables of the graph
        inner_end = np.where(first_is_input, edges[mixed, 1], edges[mixed, 0])
        outer_end = np.where(first_is_input, edges[mixed, 0], edges[mixed, 1])
        self.turned = torch.from_numpy(first_is_input)  # tables whose rows belong to the input
        self.register_buffer("ends", torch.from_numpy(np.stack([place[outer_end], place[inner_end]])), persistent=False)
        self.pairs = nn.Parameter(torch.zeros(len(self.inner), 2, 2, dtype=torch.float64))
        self.links = nn.Parameter(torch.zeros(len(mixed), 2, 2, dtype=torch.float64))  # (edge, other, input)

    def forward(self, graph: rf.FactorGraph, inputs: Tensor) -> Tensor:
        """Theta of shape (example, theta) from the states of the inputs, of shape (example, input)."""
        outer, inner = self.get_buffer("ends")
        at_zero, slope = self.links[..., 0], self.links[..., 1] - self.links[..., 0]
        size = graph.num_variables
        base = slope.new_zeros(size, 2).index_add(0, inner, at_zero)
        matrix = slope.new_zeros(self.num_inputs, size, 2).index_put((outer, inner), slope)
        nodes = base + (inputs.to(slope) @ matrix.flatten(1)).unflatten(-1, (size, 2))
        return graph.assemble([nodes], [self.pairs] if len(self.inner) else [])

    @torch.no_grad()
    def assign(self, tables: Tensor) -> None:
        """Take the parameters from tables of all edges, of shape (edge, 2, 2)."""
        self.pairs.copy_(tables[self.inner])
        links = tables[self.mixed]
        self.links.copy_(torch.where(self.turned[:, None, None], links.transpose(1, 2), links))


@dataclass(frozen=True, eq=False)
class RandomModel:
    """A model, the roles of its variables, and examples drawn from it."""

    num_variables: int
    edges: IntArray  # (edge, 2)
    tables: Tensor  # (edge, 2, 2)  log-potentials
    inputs: IntArray
    outputs: IntArray
    states: Tensor  # (example, variable)  the first half for training, the second for tests
    sample_size: float  # the effective one of the worst variable, as a share of the number of examples

    @classmethod
    def draw(cls, num_variables: int, num_edges: int, seed: int, num_examples: int, spread: float = 1.0) -> RandomModel:
        """Draw structure, parameters, roles and data; training and test examples come from different chains.

        `spread` is the standard deviation of the tables' entries.
        """
        rng = np.random.default_rng([seed, num_variables, num_edges])
        edges = random_edges(rng, num_variables, num_edges, np.empty((0, 2), np.int64))
        tables = spread * torch.from_numpy(rng.normal(size=(num_edges, 2, 2)))
        roles = rng.permutation(num_variables)
        third = round(num_variables / 3)
        graph = rf.from_edges(2, edges, num_variables=num_variables)
        theta = graph.assemble([tables.new_zeros(num_variables, 2)], [tables])
        patience = max(1.0, spread**3)  # chains mix more slowly with stronger couplings
        drawn = rf.sample(
            graph,
            theta,
            _PER_CHAIN,
            chains=-(-num_examples // _PER_CHAIN),
            burn_in=round(patience * _BURN_IN),
            thinning=round(patience * _THINNING),
            seed=int(rng.integers(2**31)),
        )
        share = float(rf.inference.effective_sample_size(drawn.double()).min()) / drawn.shape[:2].numel()
        return cls(
            num_variables,
            edges,
            tables,
            np.sort(roles[:third]),
            np.sort(roles[2 * third :]),
            drawn.flatten(0, 1)[:num_examples],
            share,
        )

    def true_model(self) -> GivenInputs:
        """The model that the data come from."""
        model = GivenInputs(self.num_variables, self.edges, self.inputs)
        model.assign(self.tables)
        return model

    def model(self, mismatch: float = 0.0, seed: int = 0) -> GivenInputs:
        """A model to be trained, with parameters 0; `mismatch` is the share of edges replaced by random other ones."""
        rng = np.random.default_rng([seed, self.num_variables, len(self.edges)])
        kept = rng.permutation(len(self.edges))[round(mismatch * len(self.edges)) :]
        edges = self.edges[np.sort(kept)]
        added = random_edges(rng, self.num_variables, len(self.edges) - len(edges), self.edges)
        return GivenInputs(self.num_variables, np.concatenate([edges, added]), self.inputs)

    def examples(self, model: GivenInputs, first: int, last: int) -> rf.Examples:
        """Examples `first` to `last` for a model of this one's variables: the outputs have labels."""
        states = self.states[first:last]
        labels = torch.full_like(states, -1)
        labels[:, self.outputs] = states[:, self.outputs]
        return rf.Examples(model.graph, labels[:, model.others], states[:, self.inputs])


def random_edges(rng: np.random.Generator, num_variables: int, count: int, taken: IntArray) -> IntArray:
    """Different edges at random, none of them among those `taken`."""
    pairs = np.stack(np.triu_indices(num_variables, 1), axis=1)
    free = ~np.isin(pairs[:, 0] * num_variables + pairs[:, 1], taken[:, 0] * num_variables + taken[:, 1])
    return pairs[free][np.sort(rng.choice(int(free.sum()), count, replace=False))]


random_model = lru_cache(maxsize=2)(RandomModel.draw)
