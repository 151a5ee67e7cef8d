"""Images as `ImageCRF` uses them: whole ones, with features in memory or on the disk, and tiles of large ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from riskfield.datasets.feature_cache import FeatureCache
from riskfield.datasets.images import read_image
from riskfield.estimators.blocks import Blocks, by_structure
from riskfield.estimators.design import Codes, Design, Grid, Sizes
from riskfield.estimators.labels import Array
from riskfield.examples import Examples
from riskfield.features.image import ImageFeatures, as_channels
from riskfield.features.resample import reduce_labels, resize
from riskfield.features.window import Tile, tiles
from riskfield.graph.factor_graph import FactorGraph
from riskfield.progress import bar

TILE_SIDE = 640  # pixels of the image along the side of a tile
TILE_MARGIN = 64  # pixels of the inference grid at the border of a tile whose marginals are discarded
_SHARE = 0.5  # of the memory; an image that would take more is predicted in tiles


@dataclass(frozen=True, eq=False)
class ImageDesign:
    """An image. Features are computed when they are needed, since they take far more memory than the image.

    An image in a file is read each time it is needed.
    """

    source: npt.NDArray[Any] | Path
    shape: tuple[int, int]  # rows and columns of the image
    features: ImageFeatures

    @classmethod
    def of(cls, example: Any, features: ImageFeatures, name: str) -> ImageDesign:
        """An array, or the path of a file, checked to be an image."""
        source = Path(example) if isinstance(example, str | os.PathLike) else np.asarray(example)
        image = read_image(source) if isinstance(source, Path) else source
        rows, columns = as_channels(image, name).shape[:2]
        return cls(source, (rows, columns), features)

    @property
    def image(self) -> npt.NDArray[Any]:
        """The pixels."""
        return read_image(self.source) if isinstance(self.source, Path) else self.source

    @property
    def structure(self) -> Grid:
        """The grid at the resolution of inference."""
        return Grid(*self.features.shape(*self.shape))

    @property
    def sizes(self) -> Sizes:
        """The same for all images."""
        return Sizes(self.features.num_pixel_features, self.features.num_edge_features, 2)

    def inputs(self) -> dict[str, Tensor]:
        """Compute the features."""
        return self.features(self.image).inputs(torch.float32)

    def reduce(self, codes: Codes) -> Codes:
        """The label that covers most of each pixel of the grid."""
        grid = self.structure
        return reduce_labels(torch.from_numpy(codes), (grid.rows, grid.columns)).flatten().numpy()

    def expand(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Marginals interpolated, or states repeated, at the resolution of the image."""
        grid = self.structure
        coarse = values.reshape(grid.rows, grid.columns, *values.shape[1:])
        if values.ndim > 1:
            return np.asarray(resize(torch.from_numpy(coarse), self.shape).numpy())
        rows, columns = self.shape
        row, column = np.arange(rows) * grid.rows // rows, np.arange(columns) * grid.columns // columns
        return coarse[np.ix_(row, column)]

    def parts(self, num_states: int) -> list[TileDesign] | None:
        """The parts that are separate examples in training, or None if the image is one. They read it when needed."""
        windows = self.features.training_parts(self.shape, num_states)
        if windows is None:
            return None
        return [TileDesign(self.source, self.features, Tile(window, window)) for window in windows]

    def tiles(self, tiling: Sequence[Tile]) -> list[TileDesign]:
        """Its tiles, which share the pixels."""
        image = self.image
        return [TileDesign(image, self.features, tile) for tile in tiling]

    def join(self, tiling: Sequence[Tile], parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """States or marginals at the resolution of the image, from those that `TileDesign.expand` gives."""
        grid = self.structure
        joined = np.empty((grid.rows, grid.columns, *parts[0].shape[2:]), parts[0].dtype)
        for tile, part in zip(tiling, parts, strict=True):
            joined[tile.kept.slices] = part
        return self.expand(joined.reshape(-1, *joined.shape[2:]))


@dataclass(frozen=True, eq=False)
class TileDesign:
    """A tile of an image, in prediction, or a part of it, in training."""

    source: npt.NDArray[Any] | Path
    features: ImageFeatures
    tile: Tile

    @property
    def image(self) -> npt.NDArray[Any]:
        """The pixels of the whole image."""
        return read_image(self.source) if isinstance(self.source, Path) else self.source

    @property
    def structure(self) -> Grid:
        """The grid of the window."""
        return Grid(*self.tile.window.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the window."""
        return self.tile.window.shape

    @property
    def sizes(self) -> Sizes:
        """As for the image."""
        return Sizes(self.features.num_pixel_features, self.features.num_edge_features, 2)

    def inputs(self) -> dict[str, Tensor]:
        """Compute the features of the window."""
        return self.features(self.image, self.tile.window).inputs(torch.float32)

    def reduce(self, codes: Codes) -> Codes:
        """The labels of the window, which are at the resolution of inference already."""
        return codes.flatten()

    def expand(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """What is kept of the states or marginals of the window, (row, column, *)."""
        kept = self.tile.kept.inside(self.tile.window)
        return values.reshape(*self.shape, *values.shape[1:])[kept.slices]


@dataclass(frozen=True)
class ImageBlocks(Blocks):
    """Makes blocks of images. In training, those too large for the memory are cut into parts."""

    def labelled(
        self, designs: Sequence[Design], codes: Sequence[Codes], weights: Array | None, *, verbose: bool
    ) -> Iterator[Examples]:
        """All images with their labels, for training."""
        yield from super().labelled(*_in_parts(designs, codes, weights, self.num_states), verbose=verbose)

    def origins(self, designs: Sequence[Design]) -> list[int]:
        """The number of the image that each example of `labelled` comes from."""
        return _origins(designs, self.num_states)


@dataclass(frozen=True)
class MappedBlocks(Blocks):
    """Makes blocks of one image each, whose features are mapped to files: they are read when they are used."""

    cache: FeatureCache

    def labelled(
        self, designs: Sequence[Design], codes: Sequence[Codes], weights: Array | None, *, verbose: bool
    ) -> Iterator[Examples]:
        """All images with their labels, for training. They stay on the CPU, in single precision.

        They are in the order in which `Blocks` has them, so that the same ones are held out.
        """
        designs, codes, weights = _in_parts(designs, codes, weights, self.num_states)
        graphs: dict[Grid, FactorGraph] = {}
        order = list(chain.from_iterable(by_structure(designs)))
        for k in bar(order, shown=verbose, what="features"):
            design = designs[k]
            assert isinstance(design, ImageDesign | TileDesign)
            window = design.tile.window if isinstance(design, TileDesign) else None
            maps, grid = self.cache.mapped(design.features, design.image, window), design.structure
            if grid not in graphs:
                graphs[grid] = grid.graph(self.num_states)
            inputs = {name: rows[None] for name, rows in maps.inputs(torch.float32).items()}
            labels = torch.from_numpy(design.reduce(codes[k]))[None]
            own = None if weights is None else torch.from_numpy(weights[k : k + 1])
            yield Examples(graphs[grid], labels, inputs, weights=own)

    def origins(self, designs: Sequence[Design]) -> list[int]:
        """The number of the image that each example of `labelled` comes from."""
        return _origins(designs, self.num_states)


def _in_parts(
    designs: Sequence[Design], codes: Sequence[Codes], weights: Array | None, num_states: int
) -> tuple[list[Design], list[Codes], Array | None]:
    """Images with their labels and weights, where parts take the place of images too large for the memory."""
    found, labels, rows = list[Design](), list[Codes](), list[int]()
    for k, design in enumerate(designs):
        assert isinstance(design, ImageDesign)
        parts, grid = design.parts(num_states), design.structure
        if parts is None:
            found.append(design)
            labels.append(codes[k])
        else:
            found += parts
            coarse = design.reduce(codes[k]).reshape(grid.rows, grid.columns)
            labels += [coarse[part.tile.window.slices] for part in parts]
        rows += [k] * (1 if parts is None else len(parts))
    return found, labels, None if weights is None else weights[rows]


def _origins(designs: Sequence[Design], num_states: int) -> list[int]:
    """The number of the image of each design of `_in_parts`, in the order of their blocks."""
    found, numbers = list[Design](), list[int]()
    for k, design in enumerate(designs):
        assert isinstance(design, ImageDesign)
        parts: Sequence[Design] = design.parts(num_states) or [design]
        found += parts
        numbers += [k] * len(parts)
    return [numbers[k] for k in chain.from_iterable(by_structure(found))]


def tiling_of(features: ImageFeatures, shape: tuple[int, ...], num_classes: int) -> list[Tile] | None:
    """The tiles in which an image is predicted, or None if it is predicted as a whole.

    Raises:
        MemoryError: if an image does not fit into memory, and its features depend on the whole image.
    """
    share = features.memory_share(shape, num_classes)
    if share <= _SHARE:
        return None
    if features.reach is None:
        if share <= 1:
            return None
        raise MemoryError(
            f"An image of {shape[1]} x {shape[0]} pixels would take about {share:.0%} of the memory, and cannot be cut "
            "into tiles, because `reach` of a feature is None. Scale the image down first, or state the `reach`."
        )
    side = max(round(TILE_SIDE * features.scale), 4 * TILE_MARGIN)
    found = tiles(features.shape(*shape[:2]), side, TILE_MARGIN)
    return found if len(found) > 1 else None
