r"""A grid CRF on the logits of a network, as a PyTorch layer.

    p(y | x)  propto  exp( sum_i logit_i(y_i) + sum_d sum_{(i, j) in direction d} theta_ij(y_i, y_j) )
    theta_ij = W_d + exp(-|x_i - x_j|^2 / 2 s^2) V_d + given_ij

Here y_i is the class of pixel i and x_i its colour. W_d (`pairwise`) is the same for all edges of direction d. V_d
(`contrast_pairwise`) is weighted by how similar the two colours are, where s^2 is the mean of |x_i - x_j|^2 over all
edges of the image, as in GrabCut. given_ij comes from a network.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module, Parameter

from riskfield.eager import eager
from riskfield.entropy import TRW
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.grids import Slices, directions, grid
from riskfield.infer import Inference, as_inference
from riskfield.inference.algorithm import AbstractAlgorithm
from riskfield.inference.message_passing import MessagePassing
from riskfield.inference.stop import Stop
from riskfield.kernels import default_schedule
from riskfield.nn.marginal_inference import at_least_float32, blaming, require_tensors, solve

_SWEEPS = 5

_grid = functools.lru_cache(maxsize=32)(grid)  # images of many sizes share the graphs of those seen last


class GridCRF(Module):
    """A conditional random field on the pixels of an image, or the voxels of a volume: logits in, log-marginals out.

    The size of the images may change from call to call. Train the layer and the network before it together, with
    `torch.nn.functional.nll_loss` on the log-marginals.

    Arguments:
        num_classes: the number of classes.
        num_axes: 2 for images (the default), 3 for volumes.
        connectivity: how many neighbours a pixel has: 4 (the default) or 8 in images, 6 (the default) or 26 in volumes.
        contrast: whether the coupling of neighbours also depends on the contrast between them, in an image that is then
            passed to `forward`; by default False.
        inference: how marginals are computed: an `Inference`, or an algorithm. By default five sweeps of
            tree-reweighted message passing with rho = 1 / (number of directions), differentiated through the sweeps, on
            a GPU with the schedule `Coloured()`.

    Parameters: `pairwise` of shape (direction, class, class), the log-potentials of the classes of the first and the
    second pixel of an edge; with `contrast`, also `contrast_pairwise` of the same shape. They start at 0, so the layer
    starts as a softmax of the logits. The directions are those of `riskfield.grid`: in images horizontal, vertical,
    then diagonals.

    >>> import torch
    >>> crf = GridCRF(num_classes=3, contrast=True)
    >>> image, logits = torch.rand(2, 1, 6, 8), torch.randn(2, 3, 6, 8, requires_grad=True)
    >>> log_marginals = crf(logits, image)
    >>> log_marginals.shape
    torch.Size([2, 3, 6, 8])
    >>> torch.nn.functional.nll_loss(log_marginals, torch.zeros(2, 6, 8, dtype=torch.long)).backward()
    >>> crf.pairwise.grad.shape
    torch.Size([2, 3, 3])
    """

    def __init__(
        self,
        num_classes: int,
        *,
        num_axes: int = 2,
        connectivity: int | None = None,
        contrast: bool = False,
        inference: Inference | AbstractAlgorithm | None = None,
    ):
        super().__init__()
        for name, value in (("num_classes", num_classes), ("num_axes", num_axes)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer. Got {value!r}.")
        self.num_classes, self.num_axes, self.connectivity = num_classes, num_axes, connectivity
        self.contrast = contrast
        self.inference = None if inference is None else as_inference(inference)
        self._directions = directions(num_axes, connectivity)
        shape = (len(self._directions), num_classes, num_classes)
        self.pairwise = Parameter(torch.zeros(shape))
        if contrast:
            self.contrast_pairwise = Parameter(torch.zeros(shape))

    @eager
    def forward(
        self,
        logits: Tensor,
        image: Tensor | None = None,
        *,
        pairwise: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return the log-marginals, of shape (batch, class, *size).

        They are at least the logarithm of the smallest normal number of their dtype, so that a loss is never infinite.

        Arguments:
            logits: of shape (batch, class, *size), such as (batch, class, row, column).
            image: floats of shape (batch, channel, *size). Required with `contrast=True`, otherwise not allowed.
            pairwise: couplings from a network, which are added to those of the layer; by default none. Either
                log-potentials of shape (batch, direction, class, class, *size), or numbers of shape (batch, direction,
                *size), which are added where both classes are equal. The numbers at a pixel belong to the edges whose
                first end it is (the left or upper one); those at pixels without such an edge are ignored.
            mask: bool, of shape (batch, *size); by default all True. Pixels where it is False have no neighbours: they
                do not influence the others, and their log-marginals are the log-softmax of their logits.

        Raises:
            TypeError: if an argument is not a tensor.
            ValueError: if an argument has a wrong shape or dtype, or holds NaN or +inf.
        """
        self._check(logits, image, pairwise, mask)
        given = {"logits": logits, "image": image, "pairwise": pairwise, "crf.pairwise": self.pairwise}
        if self.contrast:
            given["crf.contrast_pairwise"] = self.contrast_pairwise
        with torch.autocast(logits.device.type, enabled=False), blaming(given):
            graph, theta = self._theta(at_least_float32(logits), image, pairwise, mask)
            mu, _ = solve(graph, theta, self._inference(theta.device), log_partition=False, marginals="nodes")
        marginals = graph.node_views(mu)[0]
        smallest = torch.finfo(marginals.dtype).tiny
        return marginals.clamp_min(smallest).log().transpose(1, 2).contiguous().reshape(logits.shape)

    def extra_repr(self) -> str:
        """Return the settings of the layer, for its repr."""
        return (
            f"num_classes={self.num_classes}, num_axes={self.num_axes}, connectivity={self.connectivity}, "
            f"contrast={self.contrast}, inference={self.inference}"
        )

    # -- parts --------------------------------------------------------------------------------------------------------

    def _theta(
        self, logits: Tensor, image: Tensor | None, given: Tensor | None, mask: Tensor | None
    ) -> tuple[FactorGraph, Tensor]:
        size = tuple(logits.shape[2:])
        tied = image is None and given is None and mask is None
        graph: FactorGraph = _grid(size, num_states=self.num_classes, connectivity=self.connectivity, tied=tied)
        unary = logits.flatten(2).transpose(1, 2)
        # Directions in which the image is one pixel wide have no edges, and no tables.
        present = [k for k, (first, _) in enumerate(self._directions) if _count(size, first)]
        if not present:
            return graph, graph.assemble([unary], [])
        table = self.pairwise.to(logits.dtype)
        if tied:
            return graph, graph.assemble([unary], [table[present]])
        alike = None if image is None else _likeness(at_least_float32(image), self._directions)
        blocks = [self._edges(k, logits, alike, given, mask) for k in present]
        return graph, graph.assemble([unary], [torch.cat(blocks, dim=1)])

    def _edges(
        self, k: int, logits: Tensor, alike: list[Tensor] | None, given: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """The tables of all edges in direction k, of shape (batch, edge, class, class)."""
        first, second = self._directions[k]
        count = _count(tuple(logits.shape[2:]), first)
        edges = self.pairwise[k].to(logits.dtype).expand(len(logits), count, -1, -1)
        if alike is not None:
            edges = edges + alike[k].to(logits)[..., None, None] * self.contrast_pairwise[k].to(logits)
        if given is not None:
            for_equal = given.ndim == 2 + self.num_axes  # one number for each edge
            side = 1 if for_equal else self.num_classes
            own = given[:, k].to(logits.dtype).reshape(len(logits), side**2, *logits.shape[2:])[:, :, *first]
            own = own.flatten(2).transpose(1, 2).unflatten(2, (side, side))
            edges = edges + (own * torch.eye(self.num_classes).to(logits) if for_equal else own)
        if mask is not None:
            joined = mask[:, *first] & mask[:, *second]
            edges = torch.where(joined.flatten(1)[..., None, None], edges, 0)
        return edges

    def _inference(self, device: torch.device) -> Inference:
        if self.inference is not None:
            return self.inference
        entropy, schedule = TRW(1 / len(self._directions)), default_schedule(device)
        return Inference(MessagePassing(entropy, schedule), Stop(_SWEEPS, tol=None))

    def _check(self, logits: Tensor, image: Tensor | None, pairwise: Tensor | None, mask: Tensor | None) -> None:
        require_tensors(logits=logits, image=image, pairwise=pairwise, mask=mask)
        size, num_axes = tuple(logits.shape[2:]), self.num_axes
        if logits.ndim != 2 + num_axes or logits.shape[1] != self.num_classes or not logits.is_floating_point():
            raise ValueError(
                f"`logits` must be floats of shape (batch, {self.num_classes}, *size) with {num_axes} axes of size. "
                f"Got {tuple(logits.shape)} of {logits.dtype}."
            )
        batch, number, classes = len(logits), len(self._directions), self.num_classes
        if self.contrast != (image is not None):
            wanted = "be given, because `contrast=True`" if self.contrast else "not be given, because `contrast=False`"
            raise ValueError(f"`image` must {wanted}.")
        if image is not None and (image.ndim != 2 + num_axes or (len(image), *image.shape[2:]) != (batch, *size)):
            wanted = f"({batch}, channel, {', '.join(map(str, size))})"
            raise ValueError(f"`image` must have shape {wanted}. Got {tuple(image.shape)}.")
        if image is not None and not image.is_floating_point():
            raise ValueError(f"`image` must hold floats. Got {image.dtype}.")
        allowed = ((batch, number, classes, classes, *size), (batch, number, *size))
        if pairwise is not None and tuple(pairwise.shape) not in allowed:
            raise ValueError(f"`pairwise` must have shape {allowed[0]} or {allowed[1]}. Got {tuple(pairwise.shape)}.")
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != (batch, *size)):
            raise ValueError(
                f"`mask` must be bool of shape {(batch, *size)}. Got {mask.dtype} of shape {tuple(mask.shape)}."
            )


def _count(size: tuple[int, ...], first: Slices) -> int:
    """How many edges a direction has on a grid of this size."""
    return math.prod(len(range(*part.indices(length))) for length, part in zip(size, first, strict=True))


def _likeness(image: Tensor, all_directions: list[tuple[Slices, Slices]]) -> list[Tensor]:
    """exp(-|x_i - x_j|^2 / 2 s^2) of shape (batch, edge), for each direction: 1 for equal colours, less for others."""
    squares = []
    for first, second in all_directions:
        difference = image[:, :, *first] - image[:, :, *second]
        squares.append(difference.square().sum(1).flatten(1))
    mean = torch.cat(squares, dim=1).mean(1, keepdim=True)
    scale = torch.where(mean > 0, mean, 1.0)  # in an image of one colour, all neighbours are equal
    return [torch.exp(-square / (2 * scale)) for square in squares]
