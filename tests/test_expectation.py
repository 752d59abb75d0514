"""The expected cost of a chain, against the engine itself on every branch of its randomness."""

import math

import pytest
import torch

import branches
from pyramidsd import pyramid
from pyramidsd.models.table import TableModel
from pyramidsd.tools.expectation import Curve, Stage, expected_seconds, expected_tokens, long_run_rate
from pyramidsd.types import UsageError


class Meter(TableModel):
    """Always says `token`, and adds up what its forwards cost."""

    def __init__(self, token, cost):
        super().__init__(4, lambda context: [float(i == token) for i in range(4)])
        self.cost, self.seconds = cost, 0.0

    def _forward(self, tokens, n):
        self.seconds += self.cost(len(tokens))
        return super()._forward(tokens, n)


class Keep:
    """Keeps the token at position i with probability a_i, whatever it is; else the verifier's own."""

    def __init__(self, shares):
        self.shares = shares

    def __call__(self, p, q):
        shares = [self.shares[min(i, len(self.shares) - 1)] for i in range(len(q))]
        accept = torch.tensor(shares, dtype=torch.float64).unsqueeze(-1).expand(len(q), p.probs.shape[-1])
        return accept, p.probs


COSTS = [lambda w: 1.0 + 0.9 * w, lambda w: 7.0 + 1.5 * w * w, lambda w: 31.0 + 2.0 * w]

CHAINS = {
    "plain": ([], []),
    "two levels": ([4], [(0.6,)]),
    "two levels, by position": ([3], [(0.9, 0.5, 0.2)]),
    "three levels": ([2, 3], [(0.6,), (0.7,)]),
    "three levels, by position": ([3, 2], [(0.3, 0.8), (0.9, 0.4)]),
    "nothing kept": ([2, 2], [(0.0,), (0.0,)]),
    "everything kept": ([2, 3], [(1.0,), (1.0,)]),
    "only the lower keeps": ([2, 3], [(1.0,), (0.0,)]),
}


@pytest.mark.parametrize("prompt", [1, 5])
@pytest.mark.parametrize("name", CHAINS)
def test_the_expected_cost_is_that_of_the_engine_over_all_branches(name, prompt):
    windows, shares = CHAINS[name]
    costs = COSTS[: len(windows) + 1]

    def run(rng):
        models = [Meter(token, cost) for token, cost in enumerate(costs)]
        top = pyramid(models, [Keep(share) for share in shares], windows)
        top.draft([3] * prompt, 6, rng)
        return sum(model.seconds for model in models)

    exact = sum(probability * seconds for probability, seconds in branches.walk(run))
    stages = [Stage(cost, *numbers) for cost, *numbers in zip(costs, [0, *windows], [(), *shares], strict=True)]
    assert expected_seconds(stages, 6, prompt) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("share", "window"), [(a, k) for a in (0.2, 0.5, 0.9) for k in (1, 4, 11)])
def test_tokens_per_pass_are_the_geometric_sum(share, window):
    """(1 - a^(k+1)) / (1 - a), Leviathan et al., arXiv 2211.17192, equation 1."""
    stage = Stage(lambda w: 1.0, window, (share,))
    assert expected_tokens(stage) == pytest.approx((1 - share ** (window + 1)) / (1 - share))


def test_a_drafter_that_often_has_nothing():
    """With probability 1 - s a round is a plain step."""
    stage = Stage(lambda w: 1.0, 4, (1.0,), supply=0.25)
    assert expected_tokens(stage) == pytest.approx(0.25 * 5 + 0.75)


def test_long_answers_cost_what_they_cost_in_the_long_run():
    """Renewal theorem: a round of a chain that is never behind costs the same each time."""
    stages = [Stage(lambda w: 1.0), Stage(lambda w: 10.0, 3, (0.5,))]
    per_round, tokens = 3 * 1.0 + 10.0, (1 - 0.5**4) / 0.5
    slope = (expected_seconds(stages, 3000) - expected_seconds(stages, 1000)) / 2000
    assert slope == pytest.approx(per_round / tokens, rel=1e-6)


@pytest.mark.parametrize("name", CHAINS)
def test_the_long_run_is_where_long_answers_go(name):
    windows, shares = CHAINS[name]
    stages = [Stage(cost, *numbers) for cost, *numbers in zip(COSTS, [0, *windows], [(), *shares], strict=False)]
    slope = (expected_seconds(stages, 96) - expected_seconds(stages, 72)) / 24
    assert long_run_rate(stages) == pytest.approx(1 / slope, rel=1e-3)


def test_a_curve_goes_through_the_means_and_between_them():
    curve = Curve.of([(1, 3, 3.0), (1, 1, 5.0), (9, 2, 12.0)])
    assert curve(1) == 2.0
    assert curve(9) == 6.0
    assert curve(5) == 4.0
    assert curve(13) == 8.0
    assert math.isclose(Curve((4,), (2.0,))(8), 4.0)
    with pytest.raises(UsageError, match="no forward"):
        Curve.of([])
