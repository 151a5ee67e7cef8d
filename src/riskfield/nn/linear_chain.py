r"""A linear-chain CRF as a PyTorch layer.

    p(y | x)  propto  exp( start(y_1) + sum_t emission_t(y_t) + sum_t transition(y_{t-1}, y_t) + end(y_L) )

Here y_1, ..., y_L are the tags of a sequence x of length L. One sweep of belief propagation on a chain is exact, and
the gradient of the log-partition function is the marginals, so the likelihood needs no backward pass through the sweep.
Sequences of different lengths form one batch on the longest chain: positions after the end are in an additional state,
*padding*, whose log-potentials are 0.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import pad

from riskfield.adjoints.envelope import Envelope
from riskfield.adjoints.transforms import is_vmapped
from riskfield.eager import eager
from riskfield.graph.builders import chain
from riskfield.graph.factor_graph import FactorGraph
from riskfield.infer import Inference
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.losses.loss import LossLike, as_loss, name_in_errors
from riskfield.nn.marginal_inference import at_least_float32, blaming, require_tensors, solve

_NEG_INF = float("-inf")
_MARGINALS = Inference(MessagePassing(), Stop(1, tol=None))
# One sweep is exact, so the tolerance is never missed. It tells `Envelope` that the run has converged.
_LIKELIHOOD = Inference(MessagePassing(), Stop(1, tol=1.0), Envelope())
_REDUCTIONS = ("none", "sum", "mean", "token_mean")

_chain = functools.lru_cache(maxsize=256)(chain)  # by length and number of states


class LinearChainCRF(Module):
    """A linear-chain conditional random field on the outputs of a network.

    `crf(emissions, tags, mask)` is the loss to minimise, by default the exact negative log-likelihood;
    `crf.decode(emissions, mask)` gives the best tags and `crf.marginals(emissions, mask)` their probabilities.

    The layer can replace `CRF` of the package pytorch-crf: arguments, shapes, defaults and the names of the parameters
    are the same, so a state dict can be loaded. One thing differs: **pytorch-crf returns the log-likelihood, and this
    layer returns its negative.** Instead of `loss = -crf(...)` write `loss = crf(...)`.

    Arguments:
        num_tags: the number of tags.
        batch_first: whether emissions have shape (batch, position, tag), instead of (position, batch, tag); by default
            False.
        loss: any loss of `riskfield.losses`, or a function of (solution, labels, mask), instead of the likelihood (the
            default). `UnivariateLogistic()`, for example, trains the marginals. The loss is computed on chains without
            padding, one batch for each length of sequences.

    Parameters: `start_transitions` and `end_transitions` of shape (tag,), and `transitions` of shape (tag, tag), from
    the tag in the first axis to that in the second. An entry of -inf forbids a transition.

    >>> import torch
    >>> crf = LinearChainCRF(num_tags=5)
    >>> emissions = torch.randn(3, 2, 5, requires_grad=True)  # (position, batch, tag)
    >>> tags = torch.tensor([[0, 1], [2, 4], [3, 1]])
    >>> mask = torch.tensor([[True, True], [True, True], [True, False]])
    >>> crf(emissions, tags, mask).backward()
    >>> [len(best) for best in crf.decode(emissions, mask)]
    [3, 2]
    >>> crf.marginals(emissions, mask).sum(-1).round(decimals=4).tolist()
    [[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]]
    """

    def __init__(self, num_tags: int, batch_first: bool = False, *, loss: LossLike | None = None):
        super().__init__()
        if not isinstance(num_tags, int | np.integer) or isinstance(num_tags, bool) or num_tags < 1:
            raise ValueError(f"`num_tags` must be a positive integer. Got {num_tags!r}.")
        self.num_tags, self.batch_first = num_tags, batch_first
        self.loss = None if loss is None else as_loss(loss)
        self.start_transitions = Parameter(torch.empty(num_tags))
        self.end_transitions = Parameter(torch.empty(num_tags))
        self.transitions = Parameter(torch.empty(num_tags, num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly from -0.1 to 0.1, as pytorch-crf does."""
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter, -0.1, 0.1)

    @eager
    def forward(self, emissions: Tensor, tags: Tensor, mask: Tensor | None = None, reduction: str = "sum") -> Tensor:
        """Return the loss: by default the *negative* log-likelihood of `tags`.

        Arguments:
            emissions: scores of the tags, of shape (position, batch, tag), or (batch, position, tag) with
                `batch_first`.
            tags: the true tags, integers of shape (position, batch) or (batch, position).
            mask: of the same shape: True (or 1) at the positions of a sequence, False at the padding that follows it;
                by default there is no padding.
            reduction: "none" for one number per sequence, "sum" (the default) for their sum, "mean" for their mean over
                the sequences, or "token_mean" for their sum divided by the number of positions without padding.

        Raises:
            TypeError: if an argument is not a tensor.
            ValueError: if an argument has a wrong shape, dtype or entries, or `reduction` is none of the above.
        """
        if reduction not in _REDUCTIONS:
            raise ValueError(f"`reduction` must be one of {', '.join(_REDUCTIONS)}. Got {reduction!r}.")
        unary, mask = self._checked(emissions, mask)
        tags = self._checked_tags(tags, emissions, mask)
        with torch.autocast(unary.device.type, enabled=False), blaming({"emissions": emissions, **self._named()}):
            losses = self._likelihood(unary, tags, mask) if self.loss is None else self._losses(unary, tags, mask)
        if reduction == "none":
            return losses
        total = losses.sum()
        return total if reduction == "sum" else total / (len(losses) if reduction == "mean" else mask.sum())

    @eager
    def marginals(self, emissions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the marginal probabilities of the tags, in the shape of `emissions`. They are differentiable.

        Arguments:
            emissions, mask: as for `forward`. The probabilities at padding are 0.
        """
        unary, mask = self._checked(emissions, mask)
        with torch.autocast(unary.device.type, enabled=False), blaming({"emissions": emissions, **self._named()}):
            graph, theta = self._padded(unary, mask)
            mu, _ = solve(graph, theta, _MARGINALS, log_partition=False, marginals="nodes")
        probabilities = graph.node_views(mu)[0][..., : self.num_tags]
        return probabilities if self.batch_first else probabilities.transpose(0, 1)

    @eager
    @torch.no_grad()
    def decode(self, emissions: Tensor, mask: Tensor | None = None) -> list[list[int]]:
        """Return the most probable tags of each sequence (Viterbi), one list per sequence, without padding.

        Arguments:
            emissions, mask: as for `forward`.
        """
        unary, mask = self._checked(emissions, mask)
        if is_vmapped(emissions):
            raise ValueError(
                "`decode` returns lists, and cannot run inside `torch.func.vmap`. Pass it the whole batch."
            )
        lengths = mask.sum(1).tolist()
        paths = _viterbi(unary, self.transitions.to(unary.dtype), mask).tolist()
        return [path[:length] for path, length in zip(paths, lengths, strict=True)]

    def extra_repr(self) -> str:
        """Return the settings of the layer, for its repr."""
        loss = "" if self.loss is None else f", loss={self.loss}"
        return f"num_tags={self.num_tags}, batch_first={self.batch_first}{loss}"

    # -- parts --------------------------------------------------------------------------------------------------------

    def _named(self) -> dict[str, Tensor]:
        return {f"crf.{name}": parameter for name, parameter in self.named_parameters()}

    def _checked(self, emissions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Unary scores with the start and end of each sequence, of shape (batch, position, tag), and the mask."""
        require_tensors(emissions=emissions, mask=mask)
        axes = "(batch, position, tag)" if self.batch_first else "(position, batch, tag)"
        if emissions.ndim != 3 or emissions.shape[2] != self.num_tags or not emissions.is_floating_point():
            raise ValueError(
                f"`emissions` must be floats of shape {axes} with {self.num_tags} tags. "
                f"Got {tuple(emissions.shape)} of {emissions.dtype}."
            )
        scores = at_least_float32(emissions if self.batch_first else emissions.transpose(0, 1))
        if mask is None:
            mask = torch.ones(scores.shape[:2], dtype=torch.bool, device=scores.device)
        else:
            if mask.shape != emissions.shape[:2]:
                raise ValueError(f"`mask` must have shape {tuple(emissions.shape[:2])}. Got {tuple(mask.shape)}.")
            mask = (mask if self.batch_first else mask.transpose(0, 1)).bool()
            if not is_vmapped(mask) and not (mask[:, :1].all() and (mask[:, 1:] <= mask[:, :-1]).all()):
                raise ValueError(
                    "`mask` must be True at the first position of every sequence, and at no position after a False one."
                )
        if scores.shape[1] == 0:
            raise ValueError(f"`emissions` must have at least one position. Got shape {tuple(emissions.shape)}.")
        first = torch.zeros_like(mask)
        first[:, 0] = True
        last = mask & ~pad(mask[:, 1:], (0, 1))
        scores = torch.where(first.unsqueeze(-1), scores + self.start_transitions, scores)
        return torch.where(last.unsqueeze(-1), scores + self.end_transitions, scores), mask

    def _checked_tags(self, tags: Tensor, emissions: Tensor, mask: Tensor) -> Tensor:
        """Tags of shape (batch, position), 0 at padding."""
        require_tensors(tags=tags)
        if tags.shape != emissions.shape[:2] or tags.is_floating_point():
            raise ValueError(
                f"`tags` must be integers of shape {tuple(emissions.shape[:2])}. "
                f"Got {tuple(tags.shape)} of {tags.dtype}."
            )
        tags = torch.where(mask, (tags if self.batch_first else tags.transpose(0, 1)).long(), 0)
        if not is_vmapped(tags) and ((tags < 0) | (tags >= self.num_tags)).any():
            wrong = int(tags[(tags < 0) | (tags >= self.num_tags)][0])
            remedy = "Pass a mask that is False at padding." if wrong < 0 else "Tags are numbered from 0."
            raise ValueError(f"`tags` must lie in 0..{self.num_tags - 1} where the mask is True. Got {wrong}. {remedy}")
        return tags

    def _likelihood(self, unary: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """The negative log-likelihood of each sequence."""
        graph, theta = self._padded(unary, mask)
        _, value = solve(graph, theta, _LIKELIHOOD, log_partition=True, marginals="none")
        assert value is not None
        score = torch.where(mask, unary.gather(2, tags.unsqueeze(2)).squeeze(2), 0).sum(1)
        steps = self.transitions[tags[:, :-1], tags[:, 1:]].to(unary.dtype)
        return value - score - torch.where(mask[:, 1:], steps, 0).sum(1)

    def _losses(self, unary: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """The loss of each sequence, a batch for each length."""
        assert self.loss is not None
        if is_vmapped(unary) or is_vmapped(tags):
            raise ValueError(
                f"The loss `{name_in_errors(self.loss)}` cannot run inside `torch.func.vmap`: only the likelihood can."
            )
        lengths = mask.sum(1)
        losses = unary.new_zeros(len(unary))
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero()[:, 0]
            graph, theta = self._chain(unary[rows, :length], self.transitions)
            losses = losses.index_copy(0, rows, self.loss(graph, theta, tags[rows, :length], _MARGINALS))
        return losses

    def _padded(self, unary: Tensor, mask: Tensor) -> tuple[FactorGraph, Tensor]:
        """The chain of all sequences and its theta, with a state for padding if there is any."""
        if not is_vmapped(mask) and mask.all():
            return self._chain(unary, self.transitions)
        padding = torch.cat([torch.full_like(self.start_transitions, _NEG_INF), self.start_transitions.new_zeros(1)])
        states = torch.where(mask.unsqueeze(-1), pad(unary, (0, 1), value=_NEG_INF), padding.to(unary))
        return self._chain(states, pad(self.transitions, (0, 1, 0, 1)))

    def _chain(self, unary: Tensor, table: Tensor) -> tuple[FactorGraph, Tensor]:
        graph: FactorGraph = _chain(unary.shape[1], unary.shape[2], tied=True)
        return graph, graph.assemble([unary], [table.to(unary.dtype)[None]] if graph.factor_groups else [])


def _viterbi(unary: Tensor, transitions: Tensor, mask: Tensor) -> Tensor:
    """The best tags, of shape (batch, position), by the Viterbi algorithm; at padding the last tag of the sequence.

    Arguments:
        unary: of shape (batch, position, tag).
        transitions: of shape (tag, tag), from the first to the second.
        mask: of shape (batch, position): True up to the end of each sequence.
    """
    score, into = unary[:, 0], transitions.T
    itself = torch.arange(len(transitions), device=unary.device)
    pointers: list[Tensor] = []
    for position in range(1, unary.shape[1]):
        valid = mask[:, position, None]
        best, previous = (score.unsqueeze(1) + into).max(2)
        score = torch.where(valid, best + unary[:, position], score)
        pointers.append(torch.where(valid, previous, itself))
    path = [score.argmax(1, keepdim=True)]
    for previous in reversed(pointers):
        path.append(previous.gather(1, path[-1]))
    return torch.cat(path[::-1], dim=1)
