"""PyramidSD over tables: identities that hold token for token, and a plain re-telling of its round."""

from __future__ import annotations

import math

import pytest
import torch

from branches import Law, random_law
from pyramidsd import Fuzzy, Lossless, Match, Rng, Sampling, pyramid
from pyramidsd.accept import DIVERGENCES, Rule
from pyramidsd.models.table import TableModel

VOCAB_SIZE = 8
GREEDY = Sampling(temperature=0)
# For each divergence a strict, a middling and a loose threshold on the laws below.
TAUS = {
    "js": (0.01, 0.02, 0.03),
    "fsd-js": (0.01, 0.02, 0.03),
    "kl": (0.05, 0.1, 0.15),
    "reverse-kl": (0.05, 0.1, 0.15),
    "tv": (0.1, 0.15, 0.2),
    "logit": (0.1, 0.2, 0.4),
    "prob": (0.02, 0.05, 0.1),
}


def family(seed: int) -> list[Law]:
    """Draft, qualifier and target: the nearer to the target, the more alike."""
    base = random_law(100 * seed, VOCAB_SIZE)

    def near(own: Law, share: float) -> Law:
        return lambda context: [(1 - share) * a + share * b for a, b in zip(base(context), own(context), strict=True)]

    others = [random_law(100 * seed + i, VOCAB_SIZE) for i in (1, 2)]
    return [near(others[0], 0.5), near(others[1], 0.35), base]


def tables(laws: list[Law]) -> list[TableModel]:
    return [TableModel(VOCAB_SIZE, law) for law in laws]


VARIANTS = [
    *(Fuzzy(tau, name) for name, taus in TAUS.items() for tau in taus),
    *(Fuzzy(TAUS[name][1], name, coupled=True) for name in ("js", "reverse-kl", "prob")),
    Fuzzy(0.05, "kl", top_k=3),
]


@pytest.mark.parametrize(("seed", "rule"), list(enumerate(VARIANTS)), ids=str)
def test_psd_a_is_fuzzy_decoding_with_the_qualifier_as_drafter(seed: int, rule: Fuzzy):
    """At temperature 0, for any draft model and window: assisted decoding hands on the qualifier's own text."""
    models, window, draft_window = tables(family(seed)), 3 + seed % 4, (1, 2, 3, 5, 9)[seed % 5]
    psd_a = pyramid(models, [Match(), rule], [draft_window, window], GREEDY).draft([0], 110, Rng())
    fsd = pyramid(models[1:], [rule], [window], GREEDY).draft([0], 110, Rng())
    assert psd_a.tokens == fsd.tokens
    assert psd_a.stats[2] == fsd.stats[1]
    torch.testing.assert_close(psd_a.laws.logits, fsd.laws.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(psd_a.deviation, fsd.deviation, rtol=0, atol=1e-12)
    assert all(0 < stats.accepted < stats.proposed for stats in psd_a.stats[1:])


def pick(row: list[float]) -> int:
    return row.index(max(row))


def retold(laws: list[Law], taus: tuple[float, float], windows: tuple[int, int], n: int) -> list[int]:
    """PSD_F at temperature 0 and with the total variation, as the paper tells its round; no code in common."""
    draft, qualifier, target = laws

    def apart(p: list[float], q: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2

    def verified(text: list[int], drafted: list[int], p: Law, q: Law, tau: float) -> list[int]:
        kept: list[int] = []
        for token in drafted:
            if apart(p(text + kept), q(text + kept)) > tau:
                break
            kept.append(token)
        return [*kept, pick(p(text + kept))]

    out: list[int] = []
    while len(out) < n:
        text, qualified = [0, *out], []
        room = min(windows[1], n - len(out) - 1)
        while len(qualified) < room:
            drafted: list[int] = []
            while len(drafted) < min(windows[0], room - len(qualified) - 1):
                drafted.append(pick(draft(text + qualified + drafted)))
            qualified += verified(text + qualified, drafted, qualifier, draft, taus[0])
        out += verified(text, qualified, target, qualifier, taus[1])
    return out


@pytest.mark.parametrize("taus", [(0.2, 0.15), (0.25, 0.1), (0.15, 0.2)])
@pytest.mark.parametrize("windows", [(2, 5), (4, 4), (7, 3)])
def test_psd_f_is_the_round_of_the_paper(taus: tuple[float, float], windows: tuple[int, int]):
    laws = family(7)
    draft = pyramid(tables(laws), [Fuzzy(tau, "tv") for tau in taus], windows, GREEDY).draft([0], 60, Rng())
    assert draft.tokens == retold(laws, taus, windows, 60)
    assert all(0 < stats.accepted < stats.proposed for stats in draft.stats[1:])


@pytest.mark.parametrize("window", [1, 4, 15])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_an_infinite_threshold_keeps_the_qualifier(name: str, window: int):
    """Oracle: `window` tokens of the qualifier, then one of the target, from the tables themselves."""
    laws = family(3)
    draft = pyramid(tables(laws), [Match(), Fuzzy(math.inf, name)], [3, window], GREEDY).draft([0], 50, Rng())
    tokens = [0]
    while len(tokens) < 51:
        last = len(tokens) == 50  # of the last round, which has no room to draft
        tokens.append(pick(laws[2 if last or len(tokens) % (window + 1) == 0 else 1](tokens)))
    assert draft.tokens == tokens[1:]
    assert draft.stats[2].replaced == 0
    assert draft.stats[2].accepted == draft.stats[2].proposed > 0


SAME_MODEL = [Fuzzy(1e-9, name) for name in DIVERGENCES]  # 0 up to rounding


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(0.6, top_p=0.9)], ids=["greedy", "plain", "top_p"])
def test_a_draft_model_equal_to_the_qualifier_passes_the_first_stage(sampling: Sampling):
    _, qualifier, target = family(4)
    rules: list[Rule] = [Lossless(), *SAME_MODEL, *([Match()] if sampling is GREEDY else [])]
    for rule in rules:
        top = pyramid(tables([qualifier, qualifier, target]), [rule, Fuzzy(0.02)], [3, 8], sampling)
        _, stage_1, stage_2 = top.draft([0], 40, Rng(1)).stats
        assert stage_1.accepted == stage_1.proposed > 0
        assert stage_1.replaced == 0
        assert 0 < stage_2.accepted < stage_2.proposed


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(0.6, top_p=0.9)], ids=["greedy", "plain", "top_p"])
@pytest.mark.parametrize("first", [Match(), Lossless(), Fuzzy(0.05)], ids=str)
def test_a_qualifier_equal_to_the_target_passes_the_second_stage(first: Rule, sampling: Sampling):
    """Stage 2 compares with the qualifier's rows, never with the draft's, so a lossy first stage does not matter."""
    draft, _, target = family(5)
    for rule in (Fuzzy(1e-9, name) for name in DIVERGENCES):
        top = pyramid(tables([draft, target, target]), [first, rule], [3, 8], sampling)
        _, stage_1, stage_2 = top.draft([0], 40, Rng(2)).stats
        assert stage_2.accepted == stage_2.proposed > 0
        assert stage_2.replaced == 0
        assert 0 < stage_1.accepted < stage_1.proposed
