"""Conversion of images to examples on grids."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from riskfield.datasets.feature_cache import FeatureCache
from riskfield.datasets.images import LabelledImage
from riskfield.examples import Examples
from riskfield.features.image import FeatureMaps, ImageFeatures
from riskfield.features.resample import reduce_labels
from riskfield.graph.grids import grid


def image_examples(
    images: Iterable[LabelledImage],
    features: ImageFeatures,
    num_states: int,
    *,
    cache: FeatureCache | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Examples]:
    """Convert images to a data set for a `LinearModel`: one `Examples` per size, in the order of first appearance.

    The model must have the factor types "horizontal" and "vertical". If `features.scale` is below 1, a pixel of the
    grid gets the label that covers most area in it.

    Arguments:
        images: images with labels.
        features: the recipe of the features.
        num_states: the number of labels.
        cache: where to store the features. By default they are not stored.
        dtype: the dtype of the features, which must be that of the model; by default float64.

    Raises:
        ValueError: if an image has no labels, or a label that is not below `num_states`.

    >>> import numpy as np
    >>> shapes = [(4, 5), (6, 3), (4, 5)]
    >>> images = [LabelledImage(str(k), np.zeros(s), np.zeros(s, np.int64)) for k, s in enumerate(shapes)]
    >>> [(len(block), block.graph.num_variables) for block in image_examples(images, ImageFeatures(), 2)]
    [(2, 20), (1, 18)]
    """
    groups: dict[tuple[int, int], list[tuple[FeatureMaps, Tensor]]] = {}
    for image in images:
        if image.labels is None:
            raise ValueError(f"`images` must have labels. {image.name} has none.")
        if image.labels.max() >= num_states:
            raise ValueError(
                f"`images` must have labels below `num_states`, {num_states}. {image.name} has the label "
                f"{image.labels.max()}."
            )
        computed = features(image.image) if cache is None else cache(features, image.image)
        labels = reduce_labels(torch.from_numpy(image.labels), computed.shape)
        groups.setdefault(computed.shape, []).append((computed, labels.flatten()))
    return [_block(shape, num_states, group, dtype) for shape, group in groups.items()]


def _block(
    shape: tuple[int, int], num_states: int, group: list[tuple[FeatureMaps, Tensor]], dtype: torch.dtype
) -> Examples:
    each = [computed.inputs(dtype) for computed, _ in group]
    inputs = {name: torch.stack([own[name] for own in each]) for name in each[0]}
    return Examples(grid(*shape, num_states), torch.stack([labels for _, labels in group]), inputs)
