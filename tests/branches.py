"""Exact laws of tiny pyramids: randomness that walks every branch, and the oracles to compare with."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pyramidsd.types import Draft, Drafter

EDGE = 1e-15  # a branch of less probability is rounding

T = TypeVar("T")
Law = Callable[[list[int]], Sequence[float]]
Sequences = dict[tuple[int, ...], float]
Branches = list[tuple[float, Draft]]


class Branch:
    """Randomness that replays the decisions `path`, takes the first option of every later one, and notes the others.

    Attributes:
        probability: of the decisions taken so far.
        untried: paths of the options not taken.
    """

    def __init__(self, path: list[int]) -> None:
        self.probability = 1.0
        self.untried: list[list[int]] = []
        self._path = path
        self._taken: list[int] = []

    def coin(self, p: float) -> bool:
        assert -EDGE <= p <= 1 + EDGE
        if p <= EDGE or p >= 1 - EDGE:
            return p > 0.5
        return bool(self._decide({1: p, 0: 1 - p}))

    def choice(self, probs: Tensor) -> int:
        law = probs.tolist()
        assert min(law) >= 0
        assert math.isclose(sum(law), 1, abs_tol=1e-9)
        return self._decide({token: mass for token, mass in enumerate(law) if mass > 0})

    def _decide(self, options: dict[int, float]) -> int:
        step = len(self._taken)
        if step < len(self._path):
            option = self._path[step]
        else:
            option, *others = options
            self.untried += [[*self._taken, other] for other in others]
        self._taken.append(option)
        self.probability *= options[option]
        return option


def walk(run: Callable[[Branch], T]) -> list[tuple[float, T]]:
    """(probability, result) of `run` on every branch of its randomness."""
    paths: list[list[int]] = [[]]
    leaves = []
    while paths:
        rng = Branch(paths.pop())
        result = run(rng)
        leaves.append((rng.probability, result))
        paths += rng.untried
    return leaves


def drafts(top: Drafter, context: list[int], n: int) -> Branches:
    """Every draft that `top` can answer with."""
    return walk(lambda rng: top.draft(context, n, rng))


def law_of(branches: Branches) -> Sequences:
    """The law of the drafted tokens."""
    law: Sequences = defaultdict(float)
    for probability, draft in branches:
        law[tuple(draft.tokens)] += probability
    return law


def exact_law(top: Drafter, context: list[int], n: int) -> Sequences:
    """The law of the tokens that `top` drafts."""
    return law_of(drafts(top, context, n))


def chain_law(law: Law, context: list[int], n: int, stop_tokens: frozenset[int] = frozenset()) -> Sequences:
    """The oracle: n tokens drawn one by one from `law`, fewer after a stop token."""
    sequences: Sequences = {(): 1.0}
    for _ in range(n):
        longer: Sequences = {}
        for tokens, probability in sequences.items():
            if stop_tokens.intersection(tokens[-1:]):
                longer[tokens] = probability
                continue
            for token, mass in enumerate(law([*context, *tokens])):
                if mass > 0:
                    longer[*tokens, token] = probability * mass
        sequences = longer
    return sequences


def distance(a: Sequences, b: Sequences) -> float:
    """Total variation."""
    return sum(abs(a.get(tokens, 0.0) - b.get(tokens, 0.0)) for tokens in a.keys() | b.keys()) / 2


def next_laws(branches: Branches, vocab_size: int) -> dict[tuple[int, ...], Tensor]:
    """For every prefix the exact conditional law of the next token, counted from the tokens alone."""
    mass: dict[tuple[int, ...], Tensor] = defaultdict(lambda: torch.zeros(vocab_size, dtype=torch.float64))
    for probability, draft in branches:
        for i, token in enumerate(draft.tokens):
            mass[tuple(draft.tokens[:i])][token] += probability
    return {prefix: row / row.sum() for prefix, row in mass.items()}


def exported_laws(branches: Branches, vocab_size: int) -> dict[tuple[int, ...], Tensor]:
    """For every prefix the mean of the exported law rows of the next token, weighted by the branches."""
    mass: dict[tuple[int, ...], Tensor] = defaultdict(lambda: torch.zeros(vocab_size, dtype=torch.float64))
    weight: dict[tuple[int, ...], float] = defaultdict(float)
    for probability, draft in branches:
        for i, row in enumerate(draft.laws.probs):
            mass[tuple(draft.tokens[:i])] += probability * row
            weight[tuple(draft.tokens[:i])] += probability
    return {prefix: row / weight[prefix] for prefix, row in mass.items()}


def export_error(branches: Branches, vocab_size: int) -> float:
    """How far the exported laws are from the laws tokens are really drawn from: the worst total variation."""
    true, exported = next_laws(branches, vocab_size), exported_laws(branches, vocab_size)
    assert true.keys() == exported.keys()
    return max(float((true[prefix] - exported[prefix]).abs().sum()) / 2 for prefix in true)


def random_law(seed: int, vocab_size: int = 3, zeros: bool = False) -> Law:
    """A pseudo-random law that depends on the whole context; some entries are 0 if `zeros`."""
    known: dict[tuple[int, ...], list[float]] = {}

    def law(context: list[int]) -> list[float]:
        key = tuple(context)
        if key not in known:
            rng = random.Random(f"{seed} {key}")
            weights = [rng.random() ** 2 + 0.02 for _ in range(vocab_size)]
            if zeros:
                sure = rng.randrange(vocab_size)
                weights = [w if i == sure or rng.random() < 0.75 else 0.0 for i, w in enumerate(weights)]
            known[key] = [w / sum(weights) for w in weights]
        return known[key]

    return law
