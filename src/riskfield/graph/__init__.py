"""Structure: factor graphs, builders, schedules."""

from riskfield.graph.builders import Union, chain, from_edges, from_networkx
from riskfield.graph.factor_graph import FactorGraph
from riskfield.graph.grids import from_superpixels, grid
from riskfield.graph.groups import FactorGroup, NodeGroup
from riskfield.graph.schedule import Coloured, Levels, Parallel, Sequential, colour_order, colours, compile_levels

__all__ = [
    "Coloured",
    "FactorGraph",
    "FactorGroup",
    "Levels",
    "NodeGroup",
    "Parallel",
    "Sequential",
    "Union",
    "chain",
    "colour_order",
    "colours",
    "compile_levels",
    "from_edges",
    "from_networkx",
    "from_superpixels",
    "grid",
]
