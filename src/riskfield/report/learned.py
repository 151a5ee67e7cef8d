"""What models have learned about neighbours: log-potentials of pairs of classes, as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from riskfield.estimators.crf import CRF
from riskfield.estimators.image_crf import ImageCRF
from riskfield.report.evaluation import Floats
from riskfield.report.tables import interaction, potentials_table
from riskfield.report.templating import Table


@dataclass(frozen=True)
class Learned:
    """The tables of one model."""

    name: str
    series: int
    tables: tuple[Table, ...]
    has_forbidden: bool = False


def edge_tables(crfs: Mapping[str, ImageCRF], classes: Sequence[str]) -> list[Learned]:
    """Return the potentials of edges between pixels of equal colour and of edges across a step, by direction.

    The tables of all models have the same scale of colours.
    """
    found = {name: _edge_potentials(crf, len(classes)) for name, crf in crfs.items()}
    largest = max(float(np.abs(own).max()) for captions in found.values() for own in captions.values())
    return [
        Learned(
            name,
            series,
            tuple(potentials_table(caption, classes, classes, own, largest=largest) for caption, own in tables.items()),
        )
        for series, (name, tables) in enumerate(found.items())
    ]


def _edge_potentials(crf: ImageCRF, num_classes: int) -> dict[str, Floats]:
    """The potentials of each table of edges, by its caption."""
    found = {}
    for direction, horizontal in (("horizontal", True), ("vertical", False)):
        weights = crf.model_.state_dict()[f"factors.{direction}.weight"].cpu().double().numpy()
        for where, step in (("within a region", False), ("across a step", True)):
            potentials = (weights @ _edge_features(crf, horizontal, step)).reshape(num_classes, num_classes)
            found[f"{direction}, {where}"] = interaction(potentials)
    return found


def transition_tables(name: str, series: int, crf: CRF) -> Learned | None:
    """Return the potentials of pairs of tags, or None if they depend on features or join more than two tags."""
    weights = crf.model_.state_dict()["factors.factors.weight"].cpu().double()
    tags = [str(tag) for tag in crf.classes_.tolist()]
    if weights.shape != torch.Size([len(tags) ** 2, 1]):
        return None
    of_model = getattr(crf.model_, "forbidden", None)  # with the start and the end, which are not shown
    forbidden = np.zeros((len(tags), len(tags)), np.bool_) if of_model is None else of_model[:-1, :-1]
    potentials = interaction(weights.reshape(len(tags), len(tags)).numpy(), forbidden)
    table = potentials_table("", tags, tags, potentials, forbidden)
    return Learned(name, series, (table,), bool(forbidden.any()))


def _edge_features(crf: ImageCRF, horizontal: bool, step: bool) -> Floats:
    """Compute the features of an edge in a grey image, or of the edge on a step from black to white."""
    side = 2 * math.ceil(2 / crf.features_.scale)
    image = np.full((side, side), 0.5)
    if step:
        half = (np.s_[:], np.s_[side // 2 :]) if horizontal else (np.s_[side // 2 :], np.s_[:])
        image = np.zeros((side, side))
        image[half] = 1.0
    maps = crf.features_(image)
    of_edges = (maps.horizontal if horizontal else maps.vertical).flatten(0, 1).double().numpy()
    # The step is where the features differ most from those of a uniform image, which the first edge has.
    return np.asarray(of_edges[np.abs(of_edges - of_edges[0]).sum(-1).argmax()])
