r"""Pseudolikelihoods: the conditional probability of each variable, or patch of variables, given all others.

    pseudolikelihood         -sum_i log p(x_i | x_-i)                              (Besag 1975)
    patch pseudolikelihood   -sum_P log p(x_P | x_-P)                              (Zhu & Liu 2002)

(Domke 2013, section 4.1.4). The first needs no inference: p(x_i | x_-i) is a softmax of theta_i plus the slices of the
factors that contain i. The second needs inference inside each patch. Larger patches bring it closer to the likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.graph._scopes import IntArray, frozen, index_tensor, integers
from riskfield.graph.builders import from_edges
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.schedule import colours
from riskfield.infer import Inference
from riskfield.losses._class_weight import ClassWeight, checked_class_weight
from riskfield.losses._local import conditional_logits, univariate_surprise
from riskfield.losses.likelihood import clamped_value, value_inference
from riskfield.losses.loss import AbstractLoss, Target


@dataclass(frozen=True)
class Pseudolikelihood(AbstractLoss):
    """`-sum_i log p(x_i | x_-i)`. It needs no inference and is consistent if the model is well specified.

    Here `x_i` is the label of variable i, and `x_-i` are the states of all other variables. Observed variables
    condition their neighbours. Hidden variables are left out, and so are the factors that contain them.

    Arguments:
        class_weight: the weight of a target by its label, a number for each state; by default 1.

    >>> import torch
    >>> from riskfield import chain
    >>> from riskfield.losses import Pseudolikelihood
    >>> graph = chain(3, num_states=2)
    >>> Pseudolikelihood()(graph, graph.zeros(), torch.tensor([0, 1, 1]))
    tensor(2.0794, dtype=torch.float64)
    """

    additive: ClassVar[bool] = True

    class_weight: ClassWeight = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_weight", checked_class_weight(self.class_weight))

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Compute one softmax per variable."""
        logits = conditional_logits(graph, theta, target.known, graph.factor_groups)
        return univariate_surprise(graph, logits, target.labels, self.class_weight)


@dataclass(frozen=True, eq=False)
class PatchPseudolikelihood(AbstractLoss):
    """`-sum_P log p(x_P | x_-P)` over patches of variables, with inference inside the patches.

    Here `x_P` are the labels of the variables in patch P, and `x_-P` the states of all other variables.

    The patches are coloured so that patches of one colour share no factor. For each colour, all variables outside its
    patches are clamped to their labels. All colours run as one batch. `MessagePassing()` is exact for patches that are
    trees, such as the rows of a grid. `Exact()` does not profit from the clamping, because the clamped variables differ
    between the items of the batch: the whole graph must have small treewidth.

    Hidden variables are summed out, inside and outside of patches. A hidden variable may connect patches of one colour;
    these patches are then predicted jointly.

    Arguments:
        patches: the patch of every variable, integers of shape (variable,).

    >>> import torch
    >>> from riskfield import Inference, MessagePassing, grid
    >>> from riskfield.losses import PatchPseudolikelihood
    >>> graph = grid(3, 4, num_states=2)
    >>> rows = torch.arange(3).repeat_interleave(4)
    >>> loss = PatchPseudolikelihood(rows)
    >>> loss(graph, graph.zeros(), torch.zeros(12, dtype=torch.int64), Inference(MessagePassing()))  # 12 log 2
    tensor(8.3178, dtype=torch.float64)
    """

    patches: npt.ArrayLike

    def __post_init__(self) -> None:
        patches = integers(self.patches, "patches")
        if patches.ndim != 1:
            raise ValueError(f"`patches` must hold one integer per variable. Got shape {patches.shape}.")
        object.__setattr__(self, "patches", frozen(np.unique(patches, return_inverse=True)[1].reshape(-1)))

    def evaluate(self, graph: FactorGraph, theta: Tensor, target: Target, inference: Inference | None) -> Tensor:
        """Run inference once on a batch with one clamped copy of the model per colour."""
        inference = self.require(inference)
        colour = index_tensor(self._colour(graph), theta.device)  # (variable,)
        count = int(colour.max()) + 1 if len(colour) else 0
        freed = colour == torch.arange(count, device=theta.device).unsqueeze(-1)  # (colour, variable)
        freed = freed.reshape(count, *[1] * (target.labels.ndim - 1), graph.num_variables)
        outside = torch.where(freed & target.mask, -1, target.known)  # (colour, *batch, variable)
        # Its batch is larger than that of the examples, whose messages a warm start keeps.
        free = replace(value_inference(inference), memory=None)(graph, theta, evidence=outside)
        return free.log_partition.sum(0) - count * clamped_value(graph, theta, target, inference)

    def _colour(self, graph: FactorGraph) -> IntArray:
        """Return a colour for every variable. Patches that share a factor have different colours."""
        patches = np.asarray(self.patches)
        if patches.shape != (graph.num_variables,):
            raise ValueError(
                f"`patches` must hold one integer per variable ({graph.num_variables}). Got shape {patches.shape}."
            )
        pairs = np.unique(patches[graph.neighbour_pairs()], axis=0)
        neighbours = from_edges(1, pairs[pairs[:, 0] != pairs[:, 1]], num_variables=int(patches.max(initial=-1)) + 1)
        return frozen(colours(neighbours)[patches])
