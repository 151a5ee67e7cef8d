"""Labelled pictures as examples for training and tests."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad

import riskfield as rf
from papers.cells import Result

Described = tuple[rf.datasets.LabelledImage, rf.features.FeatureMaps]


def describe(pictures: Sequence[rf.datasets.LabelledImage], features: rf.features.ImageFeatures) -> list[Described]:
    """Pictures and their features, computed on all processors."""

    def both(number: int) -> Described:
        picture = pictures[number]
        return picture, features(picture.image)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(both, range(len(pictures))))


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture, and the shape of its grid for inference."""

    picture: rf.datasets.LabelledImage
    shape: tuple[int, int]  # of the grid, without padding


@dataclass(frozen=True, eq=False)
class Block:
    """Scenes on grids of one size."""

    scenes: tuple[Scene, ...]
    shape: tuple[int, int]  # of the grid, with padding
    examples: rf.Examples


@dataclass(frozen=True, eq=False)
class Scenes:
    """Pictures as examples for a `LinearModel`, block by block.

    Grids are padded at the bottom and at the right to a multiple of `frame`, so that pictures of many sizes share few
    graphs. Padded pixels have features of 0 and hidden labels, which does not change the results of the other pixels.
    """

    blocks: tuple[Block, ...]

    @classmethod
    def of(
        cls,
        described: Iterable[Described],
        num_states: int,
        *,
        frame: int = 1,
        device: str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> Scenes:
        """Put pictures with labels and their features together by size."""
        groups: dict[tuple[int, int], list[tuple[Scene, dict[str, Tensor], Tensor]]] = {}
        for picture, computed in described:
            assert picture.labels is not None
            scene = Scene(picture, computed.shape)
            rows, columns = (-(-length // frame) * frame for length in scene.shape)
            labels = rf.features.reduce_labels(torch.from_numpy(picture.labels), scene.shape)
            below, right = rows - scene.shape[0], columns - scene.shape[1]
            margin = (0, 0, 0, right, 0, below)
            framed = rf.features.FeatureMaps(
                pad(computed.pixels, margin), pad(computed.horizontal, margin), pad(computed.vertical, margin)
            )
            labels = pad(labels, (0, right, 0, below), value=-1).flatten()
            groups.setdefault((rows, columns), []).append((scene, framed.inputs(dtype), labels))
        blocks = []
        for shape, group in groups.items():
            scenes, inputs, truth = zip(*group, strict=True)
            stacked = {name: torch.stack([own[name] for own in inputs]) for name in inputs[0]}
            examples = rf.Examples(rf.grid(*shape, num_states), torch.stack(truth), stacked)
            blocks.append(Block(scenes, shape, examples.to(device)))
        return cls(tuple(blocks))

    def __len__(self) -> int:
        """How many pictures there are."""
        return sum(len(block.scenes) for block in self.blocks)

    @property
    def examples(self) -> list[rf.Examples]:
        """What `fit` takes."""
        return [block.examples for block in self.blocks]


@dataclass(frozen=True, eq=False)
class Prediction:
    """The result of inference on a scene."""

    scene: Scene
    marginals: Tensor  # (row, column, state), at the resolution of the picture
    settled: bool  # whether inference reached its tolerance, if it has one


@torch.no_grad()
def predict(model: Module, scenes: Scenes, inference: rf.Inference, chunk_size: int) -> Iterator[Prediction]:
    """A prediction for every scene, block by block."""
    for block in scenes.blocks:
        for start in range(0, len(block.scenes), chunk_size):
            part = block.examples.select(slice(start, start + chunk_size))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", rf.errors.ConvergenceWarning)  # `settled` says it
                solution = inference(part.graph, model(part.graph, part.inputs))
            settled = solution.converged | (inference.stop.tol is None)
            (nodes,) = solution.node_marginals
            for scene, own, done in zip(block.scenes[start : start + chunk_size], nodes, settled, strict=True):
                inside = own.unflatten(0, block.shape)[: scene.shape[0], : scene.shape[1]]
                yield Prediction(scene, rf.features.resize(inside, scene.picture.image.shape[:2]), bool(done))


def evaluate(model: Module, parts: Sequence[Scenes], inference: rf.Inference, chunk_size: int) -> Result:
    """How a model does on each part.

    Returns:
        errors: the share of labelled pixels, at the pictures' resolution, that are wrong.
        standard_errors: of these, from the variation between pictures, as if these were drawn at random.
        unsettled: on how many pictures inference did not reach its tolerance.
    """
    errors, standard_errors, unsettled = [], [], 0
    for scenes in parts:
        wrong, counted = [], []
        for predicted in predict(model, scenes, inference, chunk_size):
            assert predicted.scene.picture.labels is not None
            labels = torch.from_numpy(predicted.scene.picture.labels).to(predicted.marginals.device)
            known = labels >= 0
            wrong.append(int((known & (predicted.marginals.argmax(-1) != labels)).sum()))
            counted.append(int(known.sum()))
            unsettled += not predicted.settled
        errors.append(sum(wrong) / sum(counted))
        # Of a ratio of two sums.
        squares = sum((w - errors[-1] * c) ** 2 for w, c in zip(wrong, counted, strict=True))
        standard_errors.append((squares * len(wrong) / max(len(wrong) - 1, 1)) ** 0.5 / sum(counted))
    return {"errors": errors, "standard_errors": standard_errors, "unsettled": unsettled}


def check_device(device: str) -> None:
    """Raise if a device is not available."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("`device` must be 'cpu' here: torch finds no CUDA device.")


def chunk_size(device: str) -> int:
    """How many pictures are evaluated at once: few that fit into caches, or many that fill a GPU."""
    return 8 if device == "cpu" else 1024
