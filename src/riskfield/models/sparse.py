"""`SparseRows`: sparse features of variables, which stay sparse in the model and in its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from riskfield.adjoints.linear import apply_linear


class SparseRows:
    """Sparse features of the variables of n examples on one graph, as an input of a `LinearModel`.

    It takes the place of a dense tensor of shape (n, variable, feature), and has its shape and its indexing by example.

    Arguments:
        matrix: a SciPy sparse matrix of shape (n * variable, feature), example by example.
        num_examples: n, by default 1.

    >>> import scipy.sparse as sp, torch
    >>> from riskfield import LinearModel, chain
    >>> from riskfield.models import SparseRows
    >>> rows = SparseRows(sp.eye_array(6, 1000, format="csr"), num_examples=2)
    >>> rows.shape, rows[1:].shape
    ((2, 3, 1000), (1, 3, 1000))
    >>> model = LinearModel(2, node_features=1000, factor_features=1)
    >>> inputs = {"nodes": rows, "factors": torch.ones(2, 1, 1, dtype=torch.float64)}
    >>> model(chain(3, num_states=2, tied=True), inputs).shape
    torch.Size([2, 10])
    """

    ndim = 3

    def __init__(self, matrix: Any, num_examples: int = 1):
        from scipy.sparse import csr_array

        self.matrix = csr_array(matrix)
        rows, features = self.matrix.shape
        if num_examples < 0 or (rows % num_examples if num_examples else rows):
            raise ValueError(f"`matrix` must have equally many rows for each of {num_examples} examples. Got {rows}.")
        self.shape = (num_examples, rows // num_examples if num_examples else 0, features)
        self.device = torch.device("cpu")
        self._on_device: Tensor | None = None  # the matrix, on devices other than the CPU

    @classmethod
    def concatenated(cls, parts: Sequence[SparseRows]) -> SparseRows:
        """The rows of all parts, one after the other, as those of one example."""
        from scipy.sparse import vstack

        return cls(vstack([part.matrix for part in parts], format="csr")).to(parts[0].device)

    def __len__(self) -> int:
        """The number of examples."""
        return self.shape[0]

    def __getitem__(self, examples: Tensor | slice) -> SparseRows:
        """Some of the examples."""
        count, width, _ = self.shape
        numbers = np.arange(count)[examples if isinstance(examples, slice) else examples.cpu().numpy()]
        rows = (numbers[:, None] * width + np.arange(width)).reshape(-1)
        return SparseRows(self.matrix[rows], len(numbers)).to(self.device)

    def to(self, device: torch.device | str) -> SparseRows:
        """The same rows for weights on `device`: a SciPy matrix on the CPU, a torch tensor elsewhere."""
        moved = SparseRows(self.matrix, len(self))
        moved.device = torch.device(device)
        if moved.device != torch.device("cpu"):
            own = self.matrix.tocoo()
            index, values = (torch.from_numpy(part).to(device) for part in (np.stack(own.coords), own.data))
            moved._on_device = torch.sparse_coo_tensor(index.long(), values, own.shape, is_coalesced=True)
        return moved

    def times(self, weight: Tensor) -> Tensor:
        """Multiply all rows with `weight` of shape (feature, column): (n, variable, column). Differentiable."""
        product = apply_linear(
            lambda dense: self._product(dense, transposed=False),
            lambda dense: self._product(dense, transposed=True),
            weight,
        )
        return product.reshape(*self.shape[:2], product.shape[-1])

    def _product(self, dense: Tensor, transposed: bool) -> Tensor:
        """X dense, or X^T dense."""
        if self._on_device is not None:
            tensor = self._on_device.to(dense.dtype)
            product: Tensor = torch.sparse.mm(tensor.t() if transposed else tensor, dense)
            return product
        # SciPy multiplies by rows either way, without a copy of the transpose.
        matrix = self.matrix.T if transposed else self.matrix
        return torch.from_numpy(matrix @ dense.contiguous().numpy()).to(dense.dtype)


class RowLinear(nn.Linear):
    """A linear map without a constant, initialised to 0, of a dense tensor or of `SparseRows`."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__(inputs, outputs, bias=False, dtype=dtype)

    def reset_parameters(self) -> None:
        """Set all weights to 0."""
        nn.init.zeros_(self.weight)

    def forward(self, input: Tensor | SparseRows) -> Tensor:
        """Return the products of all rows with the weights."""
        if isinstance(input, SparseRows):
            return input.times(self.weight.T)
        return super().forward(input.to(self.weight.dtype))  # features may be kept in single precision
