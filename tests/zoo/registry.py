"""The models."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo import handwritten
from tests.zoo.entry import Entry
from tests.zoo.of_graphs import OF_GRAPHS
from tests.zoo.of_images import OF_IMAGES
from tests.zoo.of_physics import OF_PHYSICS
from tests.zoo.of_text import OF_TEXT
from tests.zoo.words import KEYS, PLACES


def _words(n: int) -> list[Tensor]:
    """Two sequences of n words."""
    return [torch.randint(0, 50, (2, n))]


HANDWRITTEN = [
    Entry("llama", handwritten.Llama, _words, (1,), gathers=(KEYS,)),
    Entry("gpt2", handwritten.GPT2, _words, (1,), gathers=(KEYS, PLACES)),
    Entry("afno", handwritten.AFNO, lambda n: [torch.randn(1, n, 10, 8)], (1,)),
    Entry(
        "fno",
        handwritten.FNO,
        lambda n: [torch.randn(2, 4, n, 10)],
        (2,),
        gathers=(("mixed =", "needed: the gradient of a plain weight, of which each rank has that of some modes"),),
    ),
    Entry("experts", handwritten.Experts, lambda n: [torch.randn(2, n, 8)], (1,)),
    Entry(
        "points",
        handwritten.Points,
        lambda n: [torch.randn(n, 3)],
        (0,),
        gathers=(("cdist", "needed: each point has its distance to all others"),),
    ),
    Entry(
        "images",
        handwritten.Images,
        lambda n: [torch.randn(2, 2, 2 * n, 6)],
        (2,),
        rows=(2,),
    ),
]
"""Those that need no package; the first five of them run always."""

ENTRIES = [*HANDWRITTEN, *OF_TEXT, *OF_IMAGES, *OF_GRAPHS, *OF_PHYSICS]
"""All of them."""
