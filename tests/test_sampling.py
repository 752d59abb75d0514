"""`Sampling` against transformers' own warpers and processors; `Rng` against the laws it draws from."""

from __future__ import annotations

from collections import Counter
from itertools import product
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pyramidsd import Rng, Sampling, UsageError
from pyramidsd.types import NumberError

VOCAB_SIZE = 600
CONTEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PEAKED, MIXED = (5.0, 6.0, 7.0, 8.0, 9.0, 20.0), (0.1, 0.5, 1.0, 2.0, 4.0, 9.0)


def random_rows(scales: tuple[float, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """One row per scale: near 0 a flat law, at 9 a few tokens. Some tokens are impossible."""
    rows = torch.randn(len(scales), VOCAB_SIZE, generator=torch.Generator().manual_seed(0), dtype=dtype)
    rows[: len(scales) // 2, ::3] = -torch.inf
    return rows * torch.tensor(scales, dtype=dtype).unsqueeze(-1)


def warped(sampling: Sampling, rows: Tensor) -> Tensor:
    """The oracle."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(torch.zeros(len(rows), 1, dtype=torch.long), rows.clone()).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_laws_are_those_of_the_warpers_of_transformers(temperature: float, dtype: torch.dtype):
    combinations = product((0, 1, 50, VOCAB_SIZE + 5), (0.05, 0.9, 0.999, 1.0), (0.0, 0.1, 1.0))
    for (top_k, top_p, min_p), scales in product(combinations, (PEAKED, MIXED)):
        sampling, rows = Sampling(temperature, top_k, top_p, min_p), random_rows(scales, dtype)
        laws, expected = sampling.laws(rows, CONTEXT), warped(sampling, rows)
        torch.testing.assert_close(laws.probs, expected)
        assert torch.equal(laws.probs > 0, expected > 0), sampling
        assert torch.equal(laws.logits, rows)


def test_temperature_zero_is_the_argmax_whatever_else_is_set():
    rows = random_rows(MIXED)
    for sampling in (Sampling(0), Sampling(0, top_k=3), Sampling(0, top_p=0.5), Sampling(0, min_p=0.5)):
        assert torch.equal(sampling.laws(rows, CONTEXT).probs, torch.eye(VOCAB_SIZE).double()[rows.argmax(-1)])
    ties = Sampling(0).laws(torch.zeros(2, 5), CONTEXT).probs
    assert sorted(ties[0].tolist()) == sorted(ties[1].tolist()) == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_processors_see_the_prefix_of_each_row(temperature: float):
    """Oracle: the same processors of transformers, called for one prefix after the other."""
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(5.0), NoRepeatNGramLogitsProcessor(2)])
    rows, plain = random_rows(MIXED), Sampling(temperature)
    laws = Sampling(temperature, processors=tuple(processors)).laws(rows, CONTEXT)
    for i, row in enumerate(rows.split(1)):
        prefix = torch.tensor([CONTEXT[: len(CONTEXT) - len(rows) + 1 + i]])
        expected = plain.laws(processors(prefix, row.clone()), CONTEXT).probs
        torch.testing.assert_close(laws.probs[i : i + 1], expected)
    assert torch.equal(laws.logits, rows)
    of_the_whole = plain.laws(processors(torch.tensor([CONTEXT] * len(rows)), rows.clone()), CONTEXT).probs
    assert temperature == 0 or not torch.allclose(laws.probs[0], of_the_whole[0])


def test_processors_run_in_order_and_cannot_touch_the_raw_rows():
    def add(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 0] += 100.0  # in place, as some processors do
        return scores

    rows = random_rows(MIXED)
    kept = rows.clone()
    laws = Sampling(processors=(add, lambda ids, scores: -scores)).laws(rows, CONTEXT)
    assert torch.equal(rows, kept)
    assert torch.equal(laws.logits, kept)
    kept[:, 0] += 100.0
    torch.testing.assert_close(laws.probs[3:], (-kept[3:]).softmax(-1))


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
    ],
)
def test_settings_out_of_range_are_refused(bad: dict[str, float]):
    with pytest.raises(UsageError, match=next(iter(bad))):
        Sampling(**bad)


@pytest.mark.parametrize("bad", [[0.0, float("nan"), 1.0], [0.0, float("inf"), 1.0], [-float("inf")] * 3])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(0), Sampling(0.5, top_k=1), Sampling(top_p=0.5), Sampling(min_p=0.5)],
    ids=["plain", "greedy", "top_k", "top_p", "min_p"],
)
def test_rows_without_a_law_raise_where_a_token_is_drawn(sampling: Sampling, bad: list[float]):
    law = sampling.laws(torch.tensor([bad]), [0]).probs[0]
    with pytest.raises(NumberError, match="NaN or infinite"):
        Rng().choice(law)


# Rng.

LAW = torch.tensor([0.0, 0.3, 0.0, 0.05, 0.4, 0.25, 0.0])


def test_a_seed_fixes_the_draws():
    def draws(seed: int) -> list[float]:
        rng = Rng(seed)
        return [draw for _ in range(50) for draw in (rng.choice(LAW), rng.coin(0.5))]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


def rng_that_draws(uniform: float) -> Rng:
    rng = Rng()
    rng._random = Mock(random=lambda: uniform)
    return rng


@settings(deadline=None, max_examples=100)
@given(
    weights=st.lists(st.just(0.0) | st.floats(1e-9, 1), min_size=1, max_size=8).filter(any),
    uniform=st.sampled_from([0.0, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_choice_inverts_the_distribution_function_and_draws_nothing_impossible(
    weights: list[float], uniform: float, dtype: torch.dtype
):
    """Oracle: the running sum of the law passes the uniform number at the token drawn. The ends of [0, 1) are the
    numbers at which a token of probability 0 could slip in."""
    law = torch.tensor(weights, dtype=dtype)
    law = law / law.sum()
    token = rng_that_draws(uniform).choice(law)
    assert law[token] > 0
    assert float(law[:token].double().sum()) <= uniform + 1e-6
    assert float(law[: token + 1].double().sum()) >= uniform - 1e-6


def test_choice_at_the_edges_between_tokens():
    law = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    for uniform, token in ((0.0, 1), (0.25 - 2**-53, 1), (0.25, 3), (1 - 2**-53, 3)):
        assert rng_that_draws(uniform).choice(law) == token


def test_a_sure_coin_is_sure():
    assert not rng_that_draws(0.0).coin(0.0)
    assert rng_that_draws(1 - 2**-53).coin(1.0)


@pytest.mark.statistical
@pytest.mark.parametrize("seed", [0, 1])
def test_choice_follows_the_law(seed: int):
    """Chi-square of 20,000 draws; alarm level 1e-6 per seed."""
    rng = Rng(seed)
    counts = Counter(rng.choice(LAW) for _ in range(20_000))
    possible = LAW.nonzero().flatten().tolist()
    assert set(counts) == set(possible)
    expected = LAW[possible].double() / LAW.double().sum() * 20_000
    assert chisquare([counts[token] for token in possible], expected.numpy()).pvalue > 1e-6


@pytest.mark.statistical
@pytest.mark.parametrize("p", [0.01, 0.3, 0.99])
def test_coin_follows_its_probability(p: float):
    """Exact binomial test of 20,000 coins; alarm level 1e-6 per probability."""
    rng = Rng(5)
    assert binomtest(sum(rng.coin(p) for _ in range(20_000)), 20_000, p).pvalue > 1e-6
