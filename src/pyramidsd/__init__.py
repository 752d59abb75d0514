"""Faster answers from large language models by N-level speculative decoding, at a stated quality."""

from pyramidsd.accept import Fuzzy, Lenient, Lossless, Match
from pyramidsd.drafters import PromptLookup
from pyramidsd.generate import Chunk, generate
from pyramidsd.level import Level, pyramid
from pyramidsd.sampling import Rng, Sampling
from pyramidsd.types import Draft, Laws, Stats, UsageError

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "Draft",
    "Fuzzy",
    "Laws",
    "Lenient",
    "Level",
    "Lossless",
    "Match",
    "PromptLookup",
    "Rng",
    "Sampling",
    "Stats",
    "UsageError",
    "generate",
    "pyramid",
]
