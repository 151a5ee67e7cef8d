"""Labelled pictures, ready to be trained on and tested with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad

from riskfield.data.examples import Examples
from riskfield.data.pictures import Picture
from riskfield.features.image import ImageFeatures, PictureFeatures
from riskfield.features.resample import reduce_labels, resize
from riskfield.graph.builders import grid
from riskfield.inference.settings import Inference

Described = tuple[Picture, PictureFeatures]


def describe(pictures: Sequence[Picture], features: ImageFeatures) -> list[Described]:
    """Pictures and their features, computed on all processors."""

    def both(number: int) -> Described:
        picture = pictures[number]
        return picture, features(picture.image)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        return list(threads.map(both, range(len(pictures))))


@dataclass(frozen=True, eq=False)
class Scene:
    """A picture, and the grid that inference sees of it."""

    picture: Picture
    shape: tuple[int, int]  # of the grid, without the frame around it


@dataclass(frozen=True, eq=False)
class Block:
    """Scenes on grids of one size."""

    scenes: tuple[Scene, ...]
    shape: tuple[int, int]  # of the grid, with the frame
    examples: Examples


@dataclass(frozen=True, eq=False)
class Scenes:
    """Pictures as examples for a `LinearModel`, block by block.

    Grids are widened at the bottom and at the right to a multiple of `frame`, so that pictures of many sizes share few
    graphs. There all features are 0 and labels hidden: nothing that is computed of the pixels inside changes.
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
            labels = reduce_labels(torch.from_numpy(picture.labels), scene.shape)
            below, right = rows - scene.shape[0], columns - scene.shape[1]
            margin = (0, 0, 0, right, 0, below)
            framed = PictureFeatures(
                pad(computed.pixels, margin), pad(computed.horizontal, margin), pad(computed.vertical, margin)
            )
            labels = pad(labels, (0, right, 0, below), value=-1).flatten()
            groups.setdefault((rows, columns), []).append((scene, framed.inputs(dtype), labels))
        blocks = []
        for shape, group in groups.items():
            scenes, inputs, truth = zip(*group, strict=True)
            stacked = {name: torch.stack([own[name] for own in inputs]) for name in inputs[0]}
            examples = Examples(grid(*shape, num_states), torch.stack(truth), stacked)
            blocks.append(Block(scenes, shape, examples.to(device)))
        return cls(tuple(blocks))

    def __len__(self) -> int:
        """How many pictures there are."""
        return sum(len(block.scenes) for block in self.blocks)

    @property
    def examples(self) -> list[Examples]:
        """What `fit` takes."""
        return [block.examples for block in self.blocks]


@torch.no_grad()
def marginals(model: Module, scenes: Scenes, inference: Inference, chunk_size: int) -> Iterator[tuple[Scene, Tensor]]:
    """Every scene and its marginals, (row, column, state), at the resolution of its picture."""
    for block in scenes.blocks:
        for start in range(0, len(block.scenes), chunk_size):
            part = block.examples.select(slice(start, start + chunk_size))
            (nodes,) = inference(part.graph, model(part.graph, part.inputs)).node_marginals
            for scene, own in zip(block.scenes[start : start + chunk_size], nodes, strict=True):
                inside = own.unflatten(0, block.shape)[: scene.shape[0], : scene.shape[1]]
                yield scene, resize(inside, scene.picture.image.shape[:2])


def error_rate(model: Module, scenes: Scenes, inference: Inference, chunk_size: int) -> float:
    """The share of labelled pixels, at the resolution of the pictures, whose largest marginal is another."""
    wrong = counted = 0
    for scene, mu in marginals(model, scenes, inference, chunk_size):
        assert scene.picture.labels is not None
        labels = torch.from_numpy(scene.picture.labels).to(mu.device)
        known = labels >= 0
        wrong += int((known & (mu.argmax(-1) != labels)).sum())
        counted += int(known.sum())
    return wrong / counted
