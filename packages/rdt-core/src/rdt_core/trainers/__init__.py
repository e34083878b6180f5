"""Trainers on paper: how FSDP2 and Megatron spread a model over their ranks, and how one parameter holds checkpoint tensors.

For plans and benchmarks of models that are not at hand. Sizes that do not divide are refused as the frameworks refuse them.
Nothing here imports a framework or makes a tensor; tests compare it with what the real sources declare.
"""

from .base import Catalogue, Layout, Parameter, Piece, Places, expert_of, place
from .fsdp import FsdpLayout
from .megatron import MegatronLayout
from .specs import layout_of

__all__ = [
    "Catalogue",
    "FsdpLayout",
    "Layout",
    "MegatronLayout",
    "Parameter",
    "Piece",
    "Places",
    "expert_of",
    "layout_of",
    "place",
]
