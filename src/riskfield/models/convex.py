r"""Models of inference itself: theta and the weights of a convex free energy, both from inputs and parameters.

b = argmin  -theta(y) . b + sum_f w_f(y) . f(b)                                                (Domke 2008, eq. 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference, InferenceChoice
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.convex import ConvexFreeEnergy, ConvexFunction, Term


@runtime_checkable
class LearnsInference(Protocol):
    """A model whose parameters are also those of the inference algorithm."""

    def algorithm(self, settings: AbstractAlgorithm, graph: FactorGraph, inputs: Any) -> AbstractAlgorithm:
        """The algorithm for these inputs, otherwise as in `settings`. Another algorithm is a `ValueError`."""
        ...


class ConvexModel(nn.Module):
    """Theta and the weights of a `ConvexFreeEnergy`, each by a model of its own.

    A model such as `LinearModel` computes one number for every state of a variable and every joint state of a factor.
    The model of theta computes theta itself. The other models compute logarithms of weights, so that weights stay
    positive while they are learned, and parameters of 0 give weights of 1. If the features are one-hot encodings of
    discrete inputs, as in the example, a weight can be any function of the state and the input.

    `fit` trains both, through the adjoint `KKT`. `model.log_weights.requires_grad_(False)` keeps the weights fixed.

    Arguments:
        theta: a model of theta.
        log_weights: for each convex function, a model of the logarithms of its weights.

    >>> import torch
    >>> from riskfield import LinearModel, grid
    >>> from riskfield.inference import NEGATIVE_ENTROPY
    >>> from riskfield.models import ConvexModel
    >>> model = ConvexModel(LinearModel(2, 2, 4), {NEGATIVE_ENTROPY: LinearModel(2, 2, 4)})
    >>> graph = grid(3, 3, num_states=2)
    >>> y = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1, 0])
    >>> first, second = torch.tensor(graph.factor_groups[0].variables).T
    >>> pairs = 2 * y[first] + y[second]
    >>> one_hot = torch.nn.functional.one_hot
    >>> inputs = {"nodes": one_hot(y, 2).double(), "factors": one_hot(pairs, 4).double()}
    >>> model(graph, inputs).shape, model.terms(graph, inputs)[0].weight.shape
    (torch.Size([66]), torch.Size([66]))
    """

    def __init__(self, theta: nn.Module, log_weights: Mapping[ConvexFunction, nn.Module]):
        super().__init__()
        for function, model in log_weights.items():
            if not isinstance(function, ConvexFunction) or not isinstance(model, nn.Module):
                raise TypeError(
                    f"`log_weights` must have a torch module for each ConvexFunction. Got {function!r}: {model!r}."
                )
        if not log_weights:
            raise ValueError("`log_weights` must have at least one function: theta alone has no unique minimiser.")
        self.theta = theta
        self.functions = tuple(log_weights)
        self.log_weights = nn.ModuleList(log_weights.values())

    def forward(self, graph: FactorGraph, inputs: Any = None) -> Tensor:
        """Theta of shape (*batch, theta)."""
        theta: Tensor = self.theta(graph, inputs)
        return theta

    def terms(self, graph: FactorGraph, inputs: Any = None) -> list[Term]:
        """The convex functions with their weights of shape (*batch, mu)."""
        both = zip(self.functions, self.log_weights, strict=True)
        return [Term.from_log(function, graph.expand(model(graph, inputs))) for function, model in both]

    def algorithm(self, settings: AbstractAlgorithm, graph: FactorGraph, inputs: Any = None) -> ConvexFreeEnergy:
        """`settings`, which must be a `ConvexFreeEnergy`, with the terms for these inputs."""
        if not isinstance(settings, ConvexFreeEnergy):
            raise ValueError(
                f"`inference` must run ConvexFreeEnergy(), whose weights ConvexModel learns. "
                f"Got {type(settings).__name__}."
            )
        return replace(settings, terms=self.terms(graph, inputs))


def inference_of(
    model: nn.Module, inference: InferenceChoice | None, graph: FactorGraph, inputs: Any = None
) -> Inference | None:
    """The inference to use on `graph`, with the weights that a model has learned for it.

    Raises:
        ValueError: if `inference` does not run the algorithm whose weights the model learns.

    >>> import torch
    >>> from riskfield import ConvexFreeEnergy, Inference, chain
    >>> from riskfield.inference import NEGATIVE_ENTROPY
    >>> from riskfield.models import ConvexModel, Generative
    >>> graph = chain(2, num_states=2)
    >>> model = ConvexModel(Generative(graph), {NEGATIVE_ENTROPY: Generative(graph)})
    >>> with torch.no_grad():
    ...     solution = inference_of(model, Inference(ConvexFreeEnergy()), graph)(graph, model(graph))
    >>> graph.factor(solution.mu, 0)
    tensor([[0.2500, 0.2500],
            [0.2500, 0.2500]], dtype=torch.float64)
    """
    if inference is None:
        return None
    chosen = inference.on(graph)
    if not isinstance(model, LearnsInference):
        return chosen
    return replace(chosen, algorithm=model.algorithm(chosen.algorithm, graph, inputs))
