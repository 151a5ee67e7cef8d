r"""The objective of training, as a function of the parameters gamma of the model.

    J(gamma) = sum_n w_n loss(theta(y_n; gamma), x_n) / sum_n w_n m_n  +  ridge |gamma|^2  +  lasso |gamma|_1,

where y_n are the inputs of example n, x_n its labels, w_n its weight and m_n the number of its targets. The penalties
are therefore relative to the risk per variable. With `per_variable=False` the first sum is not divided. Sums are over
the examples of all ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from riskfield.errors import RiskfieldError
from riskfield.examples import DataSet, Examples, blocks
from riskfield.infer import Inference, InferenceChoice
from riskfield.learning.ranks import Ranks
from riskfield.learning.unions import United, can_join, inference_on, unite
from riskfield.learning.warm_start import Rows, Store
from riskfield.losses.loss import AbstractLoss, empirical_risk, name_in_errors, num_counted
from riskfield.models.convex import inference_of


class Diverged(Exception):
    """The objective is not finite, or below the lower bound of its loss. The message says which and why."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The objective at one point, over all examples or a batch of them."""

    value: float  # risk + ridge |gamma|^2 + lasso |gamma|_1
    risk: float
    gradient: Tensor  # (parameter,)  without the L1 penalty, which has none at 0
    product: Tensor | None = None  # (parameter,)  the Hessian times a vector, if one was given
    amount: float = 1.0  # the denominator: how much data was evaluated

    @property
    def gradient_norm(self) -> float:
        """The largest absolute value of an entry of the gradient."""
        return float(self.gradient.abs().max())


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some rows of one block of examples, to be evaluated at once, or a union of examples."""

    block: int | None  # None for a union
    rows: Tensor
    num_rows: int  # of the whole block
    examples: Examples


class Objective:
    """The regularised risk of a model on a data set, with its derivatives.

    Arguments:
        model: a module with `theta = model(graph, inputs)`.
        data: this rank's examples.
        loss: the loss of an example.
        inference: how the loss computes marginals.
        ridge: the weight of the sum of the squared parameters, by default 0.
        lasso: the weight of the sum of the absolute values of the parameters, by default 0.
        per_variable: divide the risk by the number of targets (the default).
        chunk_size: how many examples are evaluated at once, to limit memory; by default all that share a graph.
        warm_start: start runs of inference from the messages of the previous evaluation. By default they start from
            uniform messages.
        ranks: the processes that share the work; by default this process alone.
        name: the name of `data` in error messages, by default "data".
    """

    def __init__(
        self,
        model: Module,
        data: DataSet,
        loss: AbstractLoss,
        inference: InferenceChoice | None,
        *,
        ridge: float = 0.0,
        lasso: float = 0.0,
        per_variable: bool = True,
        chunk_size: int | None = None,
        warm_start: bool = False,
        ranks: Ranks | None = None,
        name: str = "data",
    ):
        if inference is not None and not isinstance(inference, InferenceChoice):
            raise TypeError(f"`inference` must be an object such as `Inference(MessagePassing())`. Got {inference!r}.")
        self.model, self.loss, self.inference, self.ridge = model, loss, inference, ridge
        self.lasso = lasso
        self.data, self.chunk_size = blocks(data, name), chunk_size
        self.ranks = Ranks() if ranks is None else ranks
        self.parameters = trainable(model)
        self.evaluations = 0
        self.warm_start = warm_start
        self._messages: Store = {}
        self._united: list[United] | None = None
        if not warm_start and can_join(model, loss, inference):
            self._united = unite(model, self.data, chunk_size)
        counted = torch.cat([_counted(block) for block in self.data])  # variables, by weight
        weights = torch.cat([_weights(block) for block in self.data])
        totals = torch.stack([counted.sum(), weights.sum(), torch.tensor(len(weights), dtype=torch.float64)])
        variables, weight, number = self.ranks.sum_(totals.to(self.ranks.device)).tolist()
        if not variables > 0:
            raise ValueError(f"`{name}` must hold an example of positive weight with at least one target. Got none.")
        # What each example adds to the denominator. If the risk is not divided, they add up to 1, and a batch estimates
        # the whole sum.
        self._amounts = counted if per_variable else weights / weight
        self.num_examples = int(number)
        self._numbers = self.ranks.numbers(len(weights))  # of this rank's examples among all
        self.unit = 1.0 if per_variable else variables  # the risk that corresponds to 1 per variable
        # Inference to a tolerance may give a value slightly below the lower bound.
        self._floor = loss.lower_bound - 1e-3 * self.unit

    def __call__(self, examples: Tensor | None = None, along: Tensor | None = None) -> Evaluation:
        """Compute the objective and its gradient.

        Arguments:
            examples: the numbers of the examples to use, among those of this rank; by default all.
            along: a vector with an entry for each parameter. If it is given, its product with the Hessian is computed
                too.

        Raises:
            Diverged: if the value or a derivative is not finite, or the risk is below the lower bound of the loss.
        """
        self.evaluations += 1
        gamma = flat(self.parameters).detach()
        size, orders = len(gamma), 1 if along is None else 2
        sums = torch.zeros(2 + orders * size, dtype=torch.float64, device=gamma.device)
        failure: Exception | None = None
        try:
            for chunk in self._chunks(examples):
                numerator = self._numerator(chunk)
                sums[0] += numerator.detach()
                sums[2:] += self._derivatives(numerator, along)
        except (RiskfieldError, Diverged) as error:  # NaN tells the other ranks
            sums[0], failure = math.nan, error
        sums[1] = float(self._amounts.sum() if examples is None else self._amounts[examples].sum())
        self.ranks.sum_(sums)
        if not torch.isfinite(sums).all():
            what = "a derivative of the objective is not finite"
            if not torch.isfinite(sums[0]):
                what = f"the objective is {float(sums[0])}"
            raise Diverged(what if failure is None else f"{what}: {failure}") from failure
        amount = float(sums[1])
        sums = sums / (amount or 1.0)
        gradient = sums[2 : 2 + size].to(gamma) + 2 * self.ridge * gamma
        product = None if along is None else sums[2 + size :].to(gamma) + 2 * self.ridge * along
        risk = float(sums[0])
        if risk < self._floor:
            raise Diverged(
                f"the risk is {risk:.3g}, but {name_in_errors(self.loss)} cannot be negative: inference stops before "
                "its log-partition value is meaningful"
            )
        penalty = self.ridge * float(gamma.square().sum())
        if self.lasso:
            penalty += self.lasso * float(gamma.abs().sum())
        return Evaluation(risk + penalty, risk, gradient, product, amount)

    @torch.no_grad()
    def risk(self) -> float:
        """Return the risk without a gradient; NaN if it is not finite."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)
        try:
            for chunk in self._chunks(None):
                sums[0] += float(self._numerator(chunk))
        except (RiskfieldError, Diverged):
            sums[0] = math.nan
        sums[1] = float(self._amounts.sum())
        numerator, amount = self.ranks.sum_(sums).tolist()
        return float(numerator / amount)

    def batches(self, size: int, seed: int) -> Iterator[Tensor]:
        """Draw batches of about `size` examples of all ranks. Yield the numbers of this rank's examples in each batch.

        The batches depend only on the seed and the number of examples, not on the number of ranks. A batch may have no
        example of this rank.
        """
        here = torch.full((self.num_examples,), -1)
        here[self._numbers] = torch.arange(len(self._numbers))
        order = torch.randperm(self.num_examples, generator=torch.Generator().manual_seed(seed))
        for batch in here[order].tensor_split(math.ceil(self.num_examples / size)):
            yield batch[batch >= 0]

    def with_inference(self, inference: InferenceChoice) -> Objective:
        """Return the same objective with another inference."""
        other = copy.copy(self)
        other.inference, other._messages = inference, {}
        if not can_join(self.model, self.loss, inference):
            other._united = None
        return other

    def forget(self) -> None:
        """Discard the messages of warm starts."""
        self._messages.clear()

    def _numerator(self, chunk: _Chunk) -> Tensor:
        """Compute the weighted loss of the examples of a chunk."""
        part = chunk.examples.to(self.parameters[0].device)  # data sets larger than the device are kept elsewhere
        theta = self.model(part.graph, part.inputs)
        if not (theta < math.inf).all():
            raise Diverged("the model returned a theta with NaN or +inf")
        risk = empirical_risk(
            self.loss,
            part.graph,
            theta,
            part.labels,
            inference_of(self.model, self._inference_on(chunk), part.graph, part.inputs),
            evidence=part.evidence,
            mask=part.mask,
            weights=part.weights,
        )
        # A loss may not depend on some examples, such as a clique loss on single variables. It is 0 then.
        if theta.requires_grad and torch.is_grad_enabled() and not risk.requires_grad and risk != 0:
            raise ValueError(
                f"`loss` must have a gradient with respect to theta. `{name_in_errors(self.loss)}` has none: compute "
                "it from the marginals by differentiable torch operations, and do not detach it."
            )
        return risk

    def _inference_on(self, chunk: _Chunk) -> Inference | None:
        if self.inference is not None and chunk.block is None:
            return inference_on(self.inference, chunk.examples)
        inference = None if self.inference is None else self.inference.on(chunk.examples.graph)
        if inference is None or not self.warm_start or inference.stop.tol is None:
            return inference
        assert chunk.block is not None
        return replace(inference, memory=Rows(self._messages, chunk.block, chunk.rows, chunk.num_rows))

    def _derivatives(self, numerator: Tensor, along: Tensor | None) -> Tensor:
        """Return the gradient, followed by the Hessian times `along` if that is given."""
        size = sum(p.numel() for p in self.parameters)
        if not numerator.requires_grad:  # the loss does not depend on the parameters
            return numerator.new_zeros(size if along is None else 2 * size)
        gradient = flat(
            torch.autograd.grad(numerator, self.parameters, create_graph=along is not None, materialize_grads=True)
        )
        if along is None:
            return gradient
        slope, product = gradient.dot(along), torch.zeros_like(along)
        if slope.requires_grad:
            product = flat(torch.autograd.grad(slope, self.parameters, materialize_grads=True))
        return torch.cat([gradient.detach(), product])

    def _chunks(self, examples: Tensor | None) -> Iterator[_Chunk]:
        if examples is None and self._united is not None:
            yield from (_Chunk(None, torch.arange(1), 1, union.examples) for union in self._united)
            return
        start = 0
        for number, block in enumerate(self.data):
            rows = torch.arange(len(block))
            if examples is not None:
                rows = examples[(examples >= start) & (examples < start + len(block))] - start
            start += len(block)
            for some in rows.split(self.chunk_size or max(len(rows), 1)):
                if len(some):
                    whole = examples is None and len(some) == len(block)
                    yield _Chunk(number, some, len(block), block if whole else block.select(some))


def trainable(model: Module) -> list[Parameter]:
    """Return the parameters to fit."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("`model` must have a parameter that requires a gradient. Got none.")
    kinds = {f"{p.dtype} on {p.device}" for p in parameters}
    if len(kinds) > 1:
        raise ValueError(f"`model` must have parameters of one dtype on one device. Got {', '.join(sorted(kinds))}.")
    return parameters


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate all entries of some tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(values: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split `values`, laid out as by `flat`, into tensors with the shapes of `like`."""
    parts = values.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


@torch.no_grad()
def assign(parameters: Sequence[Parameter], values: Tensor) -> None:
    """Copy `values`, laid out as by `flat`, into the parameters."""
    for parameter, part in zip(parameters, unflatten(values, parameters), strict=True):
        parameter.copy_(part)


def _weights(block: Examples) -> Tensor:
    ones = torch.ones(len(block), dtype=torch.float64)
    return ones if block.weights is None else block.weights.to(ones)


def _counted(block: Examples) -> Tensor:
    number = num_counted(block.graph, block.labels, evidence=block.evidence, mask=block.mask)
    weights = _weights(block)
    return number.to(weights) * weights
