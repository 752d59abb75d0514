"""Rules as algebra: random laws p and q, and what must follow whatever they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr
from torch import Tensor

from pyramidsd import Fuzzy, Laws, Lenient, Lossless, Match, UsageError
from pyramidsd.accept import DIVERGENCES, Rule, emitted_law

EXACT = 1e-12
PER_TOKEN = [name for name, known in DIVERGENCES.items() if known.per_token]
WHOLE_LAW = [name for name, known in DIVERGENCES.items() if not known.per_token]

Pair = tuple[Laws, Laws]


def laws(probs: Tensor) -> Laws:
    """Laws drawn from without any change: their raw rows are the log-probabilities."""
    return Laws(probs.log(), probs)


@st.composite
def laws_of_size(draw: st.DrawFn, size: int) -> Tensor:
    """Row [1, size]: any weights with zeros, or one-hot."""
    weights = st.lists(st.just(0.0) | st.floats(1e-3, 1), min_size=size, max_size=size).filter(any)
    one_hot = st.integers(0, size - 1).map(lambda i: [float(i == j) for j in range(size)])
    row = torch.tensor([draw(weights | one_hot)], dtype=torch.float64)
    return row / row.sum()


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """p and q: unlike, equal, or equal up to the last bit."""
    size = draw(st.integers(2, 6))
    p = draw(laws_of_size(size))
    up = torch.nextafter(p, torch.where(p > 0, 2.0, 0.0).double())
    down = torch.nextafter(p, torch.zeros_like(p))
    q = draw(laws_of_size(size) | st.sampled_from([p, up, down]))
    return laws(p), laws(q)


def thresholds(name: str) -> st.SearchStrategy[float]:
    return st.floats(0, min(DIVERGENCES[name].largest, 5)) | st.just(math.inf)


@st.composite
def fuzzy_rules(draw: st.DrawFn) -> Fuzzy:
    name = draw(st.sampled_from(list(DIVERGENCES)))
    threshold = draw(thresholds(name))
    top_k = 0 if name in PER_TOKEN else draw(st.integers(0, 7))
    return Fuzzy(threshold, name, draw(st.booleans()), top_k)


rules = st.sampled_from([Lossless(), Match()]) | st.floats(1e-3, 1).map(Lenient) | fuzzy_rules()


def law_of(rule: Rule, pair: Pair) -> Tensor:
    p, q = pair
    return emitted_law(q.probs, *rule(p, q))


def acceptance(rule: Rule, pair: Pair) -> float:
    p, q = pair
    return float((q.probs * rule(p, q)[0]).sum())


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


many = settings(deadline=None, max_examples=40)


@many
@given(pair=pairs(), rule=rules)
def test_accept_is_a_probability_and_residual_a_law(pair: Pair, rule: Rule):
    accept, residual = rule(*pair)
    assert accept.shape == residual.shape == pair[0].probs.shape
    assert ((accept >= 0) & (accept <= 1)).all()  # false for NaN
    assert (residual >= 0).all()
    assert float(residual.sum()) == pytest.approx(1, abs=EXACT)
    assert float(law_of(rule, pair).sum()) == pytest.approx(1, abs=EXACT)


# Exact rules.


@many
@given(pair=pairs(), rule=st.sampled_from([Lossless(), Match(), Lenient(1)]))
def test_exact_rules_emit_the_law_of_the_verifier(pair: Pair, rule: Rule):
    assert distance(law_of(rule, pair), pair[0].probs) < EXACT


@many
@given(pair=pairs())
def test_lossless_accepts_one_minus_total_variation(pair: Pair):
    p, q = (x.probs[0].numpy() for x in pair)
    assert acceptance(Lossless(), pair) == pytest.approx(1 - np.abs(p - q).sum() / 2, abs=EXACT)


@many
@given(pair=pairs())
def test_match_accepts_where_two_draws_agree(pair: Pair):
    p, q = (x.probs[0].numpy() for x in pair)
    assert acceptance(Match(), pair) == pytest.approx(p @ q, abs=EXACT)
    assert acceptance(Match(), pair) <= acceptance(Lossless(), pair) + EXACT


# Lenient.


@many
@given(pair=pairs())
def test_leniency_one_is_lossless(pair: Pair):
    for lenient, lossless in zip(Lenient(1)(*pair), Lossless()(*pair), strict=True):
        assert torch.equal(lenient, lossless)


@many
@given(pair=pairs(), leniency=st.floats(1e-3, 1))
def test_lenient_is_bounded_and_its_residual_is_the_nearest(pair: Pair, leniency: float):
    """No residual can take back what acceptance alone puts above p, so that excess is the least distance there is."""
    (p, q), rule = pair, Lenient(leniency)
    law = law_of(rule, pair)
    assert (law <= p.probs / leniency + EXACT).all()
    assert acceptance(rule, pair) >= acceptance(Lossless(), pair) - EXACT

    kept = q.probs * rule(p, q)[0]
    excess = float((kept - p.probs).clamp_min(0).sum())
    assert float((law - p.probs).abs().sum() / 2) == pytest.approx(excess, abs=EXACT)


# Fuzzy. Oracles: scipy, and subsets of the vocabulary for the total variation.


def total_variation(p: np.ndarray, q: np.ndarray) -> float:
    """The largest difference of the two laws on any event."""
    size = len(p)
    events = (np.arange(2**size)[:, None] >> np.arange(size)) & 1
    return float((events @ (p - q)).max())


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # the root of -1e-17
        return float(np.nan_to_num(jensenshannon(p, q)) ** 2)


WHOLE_LAW_ORACLES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "js": jensen_shannon,
    "fsd-js": lambda p, q: float(rel_entr((p + q) / 2, p).sum() + rel_entr((p + q) / 2, q).sum()) / 2,
    "kl": lambda p, q: float(rel_entr(q, p).sum()),
    "reverse-kl": lambda p, q: float(rel_entr(p, q).sum()),
    "tv": total_variation,
}
PER_TOKEN_ORACLES: dict[str, Callable[[float, float], float]] = {
    "logit": lambda p, q: abs(math.log(p / q)) if p else math.inf,
    "prob": lambda p, q: abs(p - q),
}


def divergences(name: str, p: Tensor, q: Tensor) -> list[float]:
    """The oracle's value for every token; NaN where q = 0, since such a token is never drafted."""
    drafted = zip(p[0].tolist(), q[0].tolist(), strict=True)
    if name in PER_TOKEN_ORACLES:
        return [PER_TOKEN_ORACLES[name](a, b) if b else math.nan for a, b in drafted]
    value = max(0.0, WHOLE_LAW_ORACLES[name](p[0].numpy(), q[0].numpy()))
    return [value if b else math.nan for _, b in drafted]


def test_every_divergence_has_an_oracle():
    assert {*WHOLE_LAW_ORACLES} == {*WHOLE_LAW}
    assert {*PER_TOKEN_ORACLES} == {*PER_TOKEN}


@pytest.mark.parametrize("name", DIVERGENCES)
@many
@given(pair=pairs())
def test_divergences_have_the_values_of_their_oracles(name: str, pair: Pair):
    p, q = pair
    values = DIVERGENCES[name].measure(p.logits.log_softmax(-1), q.logits.log_softmax(-1))
    assert values.shape == (p.probs.shape if name in PER_TOKEN else (1, 1))
    for value, expected in zip(values.expand_as(q.probs)[0].tolist(), divergences(name, p.probs, q.probs), strict=True):
        if not math.isnan(expected):
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", DIVERGENCES)
@many
@given(pair=pairs(), data=st.data())
def test_fuzzy_keeps_what_is_within_the_threshold(name: str, pair: Pair, data: st.DataObject):
    """Law: q on the tokens within the threshold, the rest of its mass spread as p."""
    (p, q), values = pair, divergences(name, pair[0].probs, pair[1].probs)
    threshold = data.draw(thresholds(name))
    assume(all(value == math.inf or not abs(value - threshold) < 1e-9 for value in values))  # rounding may decide
    kept = torch.tensor([[b if value <= threshold else 0.0 for value, b in zip(values, q.probs[0], strict=True)]])
    for coupled in (False, True):
        law = law_of(Fuzzy(threshold, name, coupled), pair)
        assert distance(law, kept + (1 - kept.sum()) * p.probs) < EXACT


@many
@given(pair=pairs(), rule=fuzzy_rules())
def test_an_infinite_threshold_keeps_everything(pair: Pair, rule: Fuzzy):
    everything = Fuzzy(math.inf, rule.divergence, rule.coupled, rule.top_k)
    assert acceptance(everything, pair) == pytest.approx(1, abs=EXACT)
    assert distance(law_of(everything, pair), pair[1].probs) < EXACT


@many
@given(pair=pairs(), name=st.sampled_from(list(DIVERGENCES)), coupled=st.booleans())
def test_threshold_zero_has_the_law_of_the_verifier_where_the_laws_differ(pair: Pair, name: str, coupled: bool):
    p, q = (x.probs for x in pair)
    apart = ((p - q).abs() > 1e-6)[q > 0]
    # A per-token divergence keeps every token on which the two agree.
    assume(apart.all() if name in PER_TOKEN else apart.any())
    assert distance(law_of(Fuzzy(0, name, coupled), pair), p) < EXACT


@many
@given(pair=pairs(), rule=fuzzy_rules())
def test_coupled_has_the_same_law_and_keeps_at_least_as_much(pair: Pair, rule: Fuzzy):
    plain, coupled = (Fuzzy(rule.threshold, rule.divergence, c, rule.top_k) for c in (False, True))
    assert distance(law_of(plain, pair), law_of(coupled, pair)) < EXACT
    assert acceptance(coupled, pair) >= acceptance(plain, pair) - EXACT


def lumped(row: Tensor, kept: list[int]) -> Tensor:
    rest = [x for i, x in enumerate(row[0].tolist()) if i not in kept]
    return torch.tensor([[*(row[0, i] for i in kept), math.fsum(rest)]], dtype=torch.float64)


@pytest.mark.parametrize("name", WHOLE_LAW)
@many
@given(pair=pairs(), top_k=st.integers(1, 7))
def test_top_k_lumps_the_rest_and_never_exceeds_the_whole(name: str, pair: Pair, top_k: int):
    """Oracle: the oracle's divergence of the two laws on p's top_k tokens and one bin."""
    p, q = pair
    size = p.probs.shape[-1]
    order = p.probs[0].argsort(descending=True).tolist()
    value = float(Fuzzy(1e-3, name, top_k=top_k)._divergence(p, q))
    whole = float(Fuzzy(1e-3, name)._divergence(p, q))
    assert value <= whole + 1e-9
    if top_k >= size:
        assert value == whole
    elif p.probs[0, order[top_k - 1]] > p.probs[0, order[top_k]] + 1e-9:  # no tie for the last place
        p_bins, q_bins = (lumped(x.probs, order[:top_k]) for x in pair)
        expected = WHOLE_LAW_ORACLES[name](p_bins[0].numpy(), q_bins[0].numpy())
        assert value == pytest.approx(max(0.0, expected), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", WHOLE_LAW)
def test_top_k_keeps_a_small_rest_in_float32(name: str):
    """Head of mass 1 up to float32 rounding in p, and a rest of 1e-4 in q. Oracle: as above, in float64."""
    p, q = torch.full((1, 1000), 1e-11), torch.full((1, 1000), 1e-7)
    p[0, :4] = torch.tensor([0.9, 0.06, 0.03, 0.01])
    q[0, :4] = torch.tensor([0.8, 0.1, 0.06, 0.04])
    value = float(Fuzzy(1e-3, name, top_k=4)._divergence(laws(p), laws(q)))
    p_bins, q_bins = (lumped(x.double() / x.double().sum(), [0, 1, 2, 3])[0].numpy() for x in (p, q))
    assert value == pytest.approx(WHOLE_LAW_ORACLES[name](p_bins, q_bins), rel=1e-2, abs=1e-5)


@many
@given(pair=pairs(), name=st.sampled_from(list(DIVERGENCES)), shift=st.floats(-9, 9), temperature=st.floats(0.1, 4))
def test_divergences_read_raw_rows_known_up_to_a_constant(pair: Pair, name: str, shift: float, temperature: float):
    """Neither a constant added to a row nor the law drawn from changes the value."""
    moved = (Laws(x.logits + by, (x.logits / temperature).softmax(-1)) for x, by in zip(pair, (shift, 3), strict=True))
    rule, drafted = Fuzzy(0.1, name), pair[1].probs > 0
    values, expected = (rule._divergence(*x).expand_as(drafted)[drafted] for x in (moved, pair))
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=EXACT)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_threshold_at_the_bound_keeps_everything(name: str, dtype: torch.dtype):
    """Laws that share no token are as far apart as can be, and rounding must not decide."""
    for size in (2, 3, 7, 50):
        p = torch.rand(1, size, generator=torch.Generator().manual_seed(size), dtype=dtype)
        q = p.roll(1)
        q[:, ::2], p[:, 1::2] = 0, 0
        if size == 3:
            q = torch.tensor([[0.0, 1, 0]], dtype=dtype)
        pair = laws(p / p.sum()), laws(q / q.sum())
        assert acceptance(Fuzzy(DIVERGENCES[name].largest, name), pair) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "rule",
    [Lossless(), Match(), Lenient(0.5), *(Fuzzy(0.1, name, c) for name in DIVERGENCES for c in (False, True))],
    ids=str,
)
@pytest.mark.parametrize("p_is_sure", [False, True])
def test_one_hot_laws_in_float32(rule: Rule, p_is_sure: bool):
    """A lookup's rows hold -inf, and so do those of a model whose warpers or softmax left one token only."""
    q = Laws.one_hot([2, 0, 2])
    rows = torch.tensor([[0.5, 1.0, -0.5], [2.0, -1.0, 0.3], [-torch.inf, -torch.inf, 0.0]])
    p = Laws(rows, torch.eye(3)[rows.argmax(-1)] if p_is_sure else rows.softmax(-1))
    accept, residual = rule(p, q.like(p))
    law = emitted_law(q.probs, accept, residual)
    drafted = torch.tensor([[2], [0], [2]])
    chance = accept.gather(-1, drafted)
    assert ((chance >= 0) & (chance <= 1)).all()
    torch.testing.assert_close(residual.sum(-1), torch.ones(3))
    # One token is certain, so accepting it with that chance and else the residual is the whole law.
    assert float(chance[2]) == 1
    torch.testing.assert_close(law[2], torch.tensor([0.0, 0.0, 1.0]))
    if rule in (Lossless(), Match()):
        torch.testing.assert_close(chance, p.probs.gather(-1, drafted))
        torch.testing.assert_close(law, p.probs)


# Settings.


@pytest.mark.parametrize(
    "build",
    [
        *(lambda leniency=x: Lenient(leniency) for x in (0, -0.1, 1.1, math.inf, math.nan)),
        *(lambda name=name, t=t: Fuzzy(t, name) for name in DIVERGENCES for t in (-0.1, -math.inf, math.nan)),
        lambda: Fuzzy(math.log(2) + 1e-6),
        lambda: Fuzzy(1.001, "tv"),
        lambda: Fuzzy(1.001, "prob"),
        lambda: Fuzzy(0.1, "euclid"),
        lambda: Fuzzy(0.1, "tv", top_k=-1),
        lambda: Fuzzy(0.1, "logit", top_k=5),
        lambda: Fuzzy(0.1, "prob", top_k=5),
    ],
)
def test_settings_out_of_range_are_refused(build: Callable[[], Rule]):
    with pytest.raises(UsageError):
        build()


def test_settings_at_their_ends_are_taken():
    for name, known in DIVERGENCES.items():
        for threshold in (0, known.largest, math.inf):
            assert Fuzzy(threshold, name).threshold == threshold
