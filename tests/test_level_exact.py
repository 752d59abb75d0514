"""Levels over tables: every branch is walked, and the law that results is compared with the target's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from branches import (
    Branch,
    chain_law,
    distance,
    drafts,
    exact_law,
    export_error,
    law_of,
    next_laws,
    random_law,
    walk,
)
from pyramidsd import Draft, Fuzzy, Laws, Lenient, Level, Lossless, Match, PromptLookup, Rng, Sampling, Stats, pyramid
from pyramidsd.accept import DIVERGENCES, Rule
from pyramidsd.models.table import TableModel
from pyramidsd.types import Drafter, NumberError, Randomness, UsageError

EXACT = 1e-12

# With the laws used below every threshold keeps some slots and refuses others.
THRESHOLDS = {"js": 0.2, "fsd-js": 0.2, "kl": 0.8, "reverse-kl": 0.8, "tv": 0.45, "logit": 1.0, "prob": 0.2}
LOSSY: list[Rule] = [
    *(Fuzzy(THRESHOLDS[name], name, coupled) for name in DIVERGENCES for coupled in (False, True)),
    Fuzzy(0.1, "reverse-kl", top_k=1),
    Lenient(0.5),
]


def tables(count: int, vocab_size: int = 3, zeros: bool = False) -> list[TableModel]:
    """Models of unlike laws, the target last."""
    return [TableModel(vocab_size, random_law(seed, vocab_size, zeros)) for seed in range(count)]


def target_law(count: int, vocab_size: int = 3, zeros: bool = False) -> Callable[[list[int]], list[float]]:
    """The law of the last of `tables(...)`."""
    return random_law(count - 1, vocab_size, zeros)


def assert_every_boundary_worked(branches: list[tuple[float, Draft]]) -> None:
    for level in range(1, len(branches[0][1].stats)):
        assert any(draft.stats[level].accepted for _, draft in branches)
        assert any(draft.stats[level].replaced for _, draft in branches)


def test_walk_takes_every_branch_once():
    def run(rng: Branch) -> tuple[int, bool]:
        token = rng.choice(torch.tensor([0.5, 0.0, 0.5]))
        return token, rng.coin(0.25) if token else rng.coin(1.0)

    assert sorted(walk(run)) == [(0.125, (2, True)), (0.375, (2, False)), (0.5, (0, True))]


# Exact pyramids. Oracle: tokens drawn one by one from the target's table.

LOSSLESS = [
    # vocabulary, zeros in the laws, n, windows, lowest first
    (3, False, 4, []),
    (3, False, 3, [1]),
    (3, False, 3, [2]),
    (2, False, 4, [2]),
    (3, True, 3, [5]),
    (3, True, 4, [2]),
    (3, False, 3, [1, 2]),
    (3, False, 3, [5, 5]),
    (3, True, 3, [5, 2]),
    (2, False, 4, [1, 2]),
    (2, False, 4, [2, 2]),
    (2, False, 4, [1, 2, 3]),
]


@pytest.mark.parametrize(("vocab_size", "zeros", "n", "windows"), LOSSLESS)
def test_lossless_levels_have_the_target_law(vocab_size: int, zeros: bool, n: int, windows: list[int]):
    count = len(windows) + 1
    top = pyramid(tables(count, vocab_size, zeros), num_draft_tokens=windows)
    branches = drafts(top, [0], n)
    assert_every_boundary_worked(branches)
    assert distance(law_of(branches), chain_law(target_law(count, vocab_size, zeros), [0], n)) < EXACT
    assert export_error(branches, vocab_size) < EXACT
    assert max(float(draft.deviation.max()) for _, draft in branches) < EXACT


@pytest.mark.parametrize("windows", [[1, 1, 1], [2, 2, 2], [3, 1, 2]])
def test_lower_levels_may_have_no_room_to_draft(windows: list[int]):
    law = exact_law(pyramid(tables(4), num_draft_tokens=windows), [0], 3)
    assert distance(law, chain_law(target_law(4), [0], 3)) < EXACT


@pytest.mark.parametrize("windows", [[2], [1, 2], [2, 5]])
def test_prompt_lookup_at_the_bottom_keeps_the_target_law(windows: list[int]):
    count, prompt = len(windows), [2, 0, 1, 2, 0]
    top = pyramid([PromptLookup(), *tables(count)], num_draft_tokens=windows)
    branches = drafts(top, prompt, 3)
    assert_every_boundary_worked(branches)
    assert distance(law_of(branches), chain_law(target_law(count), prompt, 3)) < EXACT
    assert export_error(branches, 3) < EXACT


@pytest.mark.parametrize("windows", [[], [5], [1, 2], [5, 5], [2, 2, 2]])
def test_nothing_follows_a_stop_token(windows: list[int]):
    count, stop = len(windows) + 1, frozenset({1})
    branches = drafts(pyramid(tables(count), num_draft_tokens=windows, stop_tokens=stop), [0], 3)
    assert distance(law_of(branches), chain_law(target_law(count), [0], 3, stop)) < EXACT
    assert export_error(branches, 3) < EXACT


def test_what_was_drafted_after_an_accepted_stop_token_does_not_count():
    """A lookup knows no stop tokens: it proposes 1 2 0 1, and the verifier stops at 2."""
    prompt, stop = [0, 1, 2, 0], frozenset({2})
    top = Level(tables(1)[0], PromptLookup(), num_draft_tokens=4, stop_tokens=stop)
    assert distance(exact_law(top, prompt, 3), chain_law(target_law(1), prompt, 3, stop)) < EXACT

    draft = replace(top, rule=Fuzzy(math.inf)).draft(prompt, 9, Rng())
    assert draft.tokens == [1, 2]
    assert draft.stats[-1] == Stats.of_round(proposed=2, accepted=2, replaced=0, bonus=0)


def test_only_the_drafter_stops():
    """A drafter that ends its draft at a token the target does not stop at leaves the target's law as it is."""
    draft, target = tables(2)
    top = Level(target, Level(draft, stop_tokens=frozenset({1})), num_draft_tokens=3)
    assert distance(exact_law(top, [0], 3), chain_law(target_law(2), [0], 3)) < EXACT


MATCH = [
    # vocabulary, zeros in the laws, n, rules
    (3, False, 2, [Match()]),
    (3, True, 3, [Match()]),
    (3, True, 3, [Match(), Lossless()]),
    (3, True, 3, [Lossless(), Match()]),
    (3, True, 3, [Match(), Match()]),
]


@pytest.mark.parametrize(("vocab_size", "zeros", "n", "rules"), MATCH)
def test_match_keeps_the_target_law(vocab_size: int, zeros: bool, n: int, rules: list[Rule]):
    count = len(rules) + 1
    top = pyramid(tables(count, vocab_size, zeros), rules, [1, 2][-len(rules) :])
    branches = drafts(top, [0], n)
    assert_every_boundary_worked(branches)
    assert distance(law_of(branches), chain_law(target_law(count, vocab_size, zeros), [0], n)) < EXACT
    assert export_error(branches, vocab_size) < EXACT


def test_temperature_sharpens_the_law():
    """Oracle: the table's law to the power 1 / temperature."""

    def sharp(context: list[int]) -> list[float]:
        weights = [p ** (1 / 0.4) for p in target_law(3, 2)(context)]
        return [w / sum(weights) for w in weights]

    top = pyramid(tables(3, 2), num_draft_tokens=[1, 2], sampling=Sampling(temperature=0.4))
    assert distance(exact_law(top, [0], 4), chain_law(sharp, [0], 4)) < EXACT


@pytest.mark.parametrize("rule", [Lossless(), Match(), Lenient(0.5)])
@pytest.mark.parametrize("windows", [[], [3], [2, 4], [1, 2, 4]])
def test_temperature_zero_is_the_target_argmax(windows: list[int], rule: Rule):
    def best(context: list[int]) -> list[float]:
        law = target_law(len(windows) + 1)(context)
        return [float(p == max(law)) for p in law]

    top = pyramid(tables(len(windows) + 1), [rule] * len(windows), windows, Sampling(temperature=0))
    assert exact_law(top, [0], 12) == chain_law(best, [0], 12)


def test_a_drafter_may_know_fewer_tokens():
    draft, target = TableModel(2, random_law(0, 2)), TableModel(3, random_law(1))
    for rule in (Lossless(), Match()):
        branches = drafts(Level(target, Level(draft), rule), [0, 2], 2)
        assert_every_boundary_worked(branches)
        assert distance(law_of(branches), chain_law(target_law(2), [0, 2], 2)) < EXACT


# Lossy levels. Oracles: the exact law of the level itself, and the target's table above it.

DRAFT, VERIFIER, TARGET = 51, 52, 57  # the seeds for which THRESHOLDS are chosen


def lossy_level(rule: Rule, vocab_size: int) -> Level:
    return pyramid([TableModel(vocab_size, random_law(seed, vocab_size)) for seed in (DRAFT, VERIFIER)], [rule], [2])


@pytest.mark.parametrize("rule", LOSSY, ids=str)
def test_a_lossy_level_reports_its_law_and_its_deviation(rule: Rule):
    branches = drafts(lossy_level(rule, 3), [0], 3)
    assert export_error(branches, 3) < EXACT

    verifier = random_law(VERIFIER)
    for prefix, law in next_laws(branches, 3).items():
        true = float((law - torch.tensor(verifier([0, *prefix]), dtype=torch.float64)).abs().sum()) / 2
        here = [(p, float(d.deviation[len(prefix)])) for p, d in branches if (*d.tokens,)[: len(prefix)] == prefix]
        if not prefix:  # one round has begun, whatever the branch
            assert true > 0.01
            assert all(deviation == pytest.approx(true, abs=EXACT) for _, deviation in here)
        # Later the reported rows differ with the branch; their mean distance is never below the distance of the mean.
        assert sum(p * deviation for p, deviation in here) / sum(p for p, _ in here) > true - EXACT


@pytest.mark.parametrize("rule", LOSSY, ids=str)
def test_a_lossy_middle_below_an_exact_top_keeps_the_target_law(rule: Rule):
    draft, verifier, target = (random_law(seed, 2) for seed in (DRAFT, VERIFIER, TARGET))
    middle = lossy_level(rule, 2)
    own = exact_law(middle, [0], 3)
    assert distance(own, chain_law(verifier, [0], 3)) > 0.01  # some slots are kept
    assert distance(own, chain_law(draft, [0], 3)) > 0.01  # some are refused

    branches = drafts(Level(TableModel(2, target), middle, num_draft_tokens=2), [0], 4)
    assert_every_boundary_worked(branches)
    assert distance(law_of(branches), chain_law(target, [0], 4)) < EXACT
    assert export_error(branches, 2) < EXACT


@pytest.mark.parametrize(
    "rules",
    [[Fuzzy(0.2), Lenient(0.5)], [Lenient(0.5), Fuzzy(0.2)], [Fuzzy(0.8, "kl"), Fuzzy(0.2, coupled=True)]],
    ids=str,
)
def test_a_lossy_top_over_a_lossy_middle_reports_its_law(rules: list[Rule]):
    models = [TableModel(2, random_law(seed, 2)) for seed in (DRAFT, VERIFIER, TARGET)]
    branches = drafts(pyramid(models, rules, [1, 2]), [0], 4)
    assert export_error(branches, 2) < EXACT
    first = next_laws(branches, 2)[()]
    true = float((first - torch.tensor(random_law(TARGET, 2)([0]), dtype=torch.float64)).abs().sum()) / 2
    assert true > 0.01
    assert all(float(draft.deviation[0]) == pytest.approx(true, abs=EXACT) for _, draft in branches)


def test_match_accepts_less_than_lossless_and_both_as_their_formulas_say():
    """Oracle at the first slot: 1 - TV(p, q), and sum(p q)."""
    q, p = random_law(0)([0]), random_law(1)([0])
    expected = {Lossless(): sum(map(min, p, q)), Match(): sum(a * b for a, b in zip(p, q, strict=True))}
    for rule, chance in expected.items():
        top = pyramid(tables(2), [rule], [1])
        branches = walk(lambda rng, top=top: top.round([0], 2, rng))
        assert sum(mass for mass, draft in branches if draft.stats[-1].accepted) == pytest.approx(chance, abs=EXACT)


# What the checks above are able to see: each of these drafters breaks an invariant.


@dataclass(frozen=True)
class Reports:
    """Draws from one drafter and reports another law for it."""

    drafter: Drafter
    law: Callable[[list[int]], list[float]]

    def draft(self, context: list[int], n: int, rng: Randomness) -> Draft:
        draft = self.drafter.draft(context, n, rng)
        if not draft.tokens:
            return draft
        rows = [self.law(context + draft.tokens[:i]) for i in range(len(draft))]
        probs = torch.tensor(rows, dtype=torch.float64)
        return replace(draft, laws=Laws(probs.log(), probs))


@dataclass(frozen=True)
class Cautious:
    """Drafts token by token up to one of less probability than `floor`, which it keeps or discards."""

    drafter: Drafter
    floor: float
    keeps: bool

    def draft(self, context: list[int], n: int, rng: Randomness) -> Draft:
        steps: list[Draft] = []
        sure = True
        while sure and len(steps) < n:
            step = self.drafter.draft(context + [token for s in steps for token in s.tokens], 1, rng)
            sure = float(step.laws.probs[0, step.tokens[0]]) >= self.floor
            if sure or self.keeps:
                steps.append(step)
        return Draft.join(steps) if steps else self.drafter.draft(context, 0, rng)


def uniform(context: list[int]) -> list[float]:
    return [1 / 3] * 3


def distance_over(drafter: Drafter) -> float:
    """From the law of an exact level over `drafter` to the target's law."""
    top = Level(TableModel(3, random_law(TARGET)), drafter, num_draft_tokens=2)
    return distance(exact_law(top, [0], 3), chain_law(random_law(TARGET), [0], 3))


def test_the_law_is_missed_if_the_drafter_reports_another():
    draft = Level(TableModel(3, random_law(DRAFT)))
    assert distance_over(Reports(draft, random_law(DRAFT))) < EXACT
    assert distance_over(Reports(draft, uniform)) > 0.01


def test_the_law_is_missed_if_a_lossy_middle_reports_the_law_of_its_model():
    middle = lossy_level(Lenient(0.3), 3)
    assert distance_over(middle) < EXACT
    assert distance_over(Reports(middle, random_law(VERIFIER))) > 0.01
    assert export_error(drafts(Reports(middle, random_law(VERIFIER)), [0], 3), 3) > 0.01


def test_the_law_is_missed_if_the_drafter_discards_a_token_for_what_it_is():
    draft = Level(TableModel(3, random_law(DRAFT)))
    assert distance_over(Cautious(draft, 0.3, keeps=True)) < EXACT
    assert distance_over(Cautious(draft, 0.3, keeps=False)) > 0.01


# Lengths, counters and origins.

RULES = [Lossless(), Match(), Fuzzy(0.2), Fuzzy(math.inf), Lenient(0.5)]
stacks = st.integers(0, 3).flatmap(
    lambda boundaries: st.tuples(
        st.lists(st.integers(1, 7), min_size=boundaries, max_size=boundaries),
        st.lists(st.sampled_from(RULES), min_size=boundaries, max_size=boundaries),
    )
)


@settings(deadline=None, max_examples=40)
@given(stack=stacks, n=st.integers(0, 20), seed=st.integers(0, 99), stop=st.frozensets(st.integers(0, 2), max_size=1))
def test_lengths_and_counters(stack: tuple[list[int], list[Rule]], n: int, seed: int, stop: frozenset[int]):
    windows, rules = stack
    top = pyramid(tables(len(windows) + 1), rules, windows, stop_tokens=stop)
    draft = top.draft([0], n, Rng(seed))
    stopped = bool(stop.intersection(draft.tokens))

    assert len(draft) == (draft.tokens.index(min(stop)) + 1 if stopped else n)
    assert len(draft) == len(draft.laws) == len(draft.laws.logits) == len(draft.origin) == len(draft.deviation)
    assert len(draft.stats) == len(windows) + 1

    assert draft.stats[-1].emitted == len(draft)
    assert draft.origin.count(len(windows)) == draft.stats[-1].replaced + draft.stats[-1].bonus
    for below, stats in zip((Stats(), *draft.stats), draft.stats, strict=False):
        assert stats.accepted <= stats.proposed <= below.emitted
        assert 0 <= stats.forwards - stats.replaced - stats.bonus <= (stats.forwards if stop else 0)
        if not stop:
            assert stats.proposed == below.emitted


@settings(deadline=None, max_examples=40)
@given(stack=stacks, seed=st.integers(0, 99))
def test_a_round_verifies_exactly_its_window(stack: tuple[list[int], list[Rule]], seed: int):
    windows, rules = stack
    top = pyramid(tables(len(windows) + 1), rules, windows)
    for budget in (1, 2, 4, 100):
        draft = top.round([0], budget, Rng(seed))
        assert draft.stats[-1].proposed == (min(windows[-1], budget - 1) if windows else 0)
        assert 1 <= len(draft) <= budget
        assert draft.stats[-1].forwards == 1


@pytest.mark.parametrize("n", [0, 1])
def test_levels_without_work_have_an_entry_in_stats(n: int):
    top = Stats(bonus=n, forwards=n)
    for lowest in (tables(1)[0], PromptLookup()):
        draft = pyramid([lowest, *tables(3)]).draft([0, 1, 0], n, Rng())
        assert len(draft) == n
        assert draft.stats == (Stats(), Stats(), Stats(), top)
    assert pyramid(tables(1)).draft([0], n, Rng()).stats == (top,)


def test_origin_is_the_level_that_first_proposed_the_token():
    """With everything kept the pattern follows from the windows: two drafts and a bonus, one bonus, one more."""
    draft = pyramid(tables(3), [Fuzzy(math.inf)] * 2, [2, 4]).draft([0], 8, Rng())
    assert draft.origin == [0, 0, 1, 1, 2, 0, 1, 2]
    assert draft.stats == (
        Stats(bonus=3, forwards=3),
        Stats((2, 1), (2, 1), bonus=3, forwards=3),
        Stats((2, 2, 1, 1), (2, 2, 1, 1), bonus=2, forwards=2),
    )


def test_origin_of_a_replacement_is_the_level_that_replaced():
    """Laws without doubt: the draft says 0, the qualifier 1, and the target 1 after an even context, else 2."""
    draft = TableModel(3, lambda context: [1, 0, 0])
    qualifier = TableModel(3, lambda context: [0, 1, 0])
    target = TableModel(3, lambda context: [0, 1, 0] if len(context) % 2 == 0 else [0, 0, 1])
    out = pyramid([draft, qualifier, target], num_draft_tokens=[2, 2]).draft([0, 0], 5, Rng())
    assert out.tokens == [1, 2, 1, 2, 1]
    assert out.origin == [1, 2, 1, 2, 2]
    assert (out.stats[1].accepted, out.stats[1].replaced) == (0, 2)
    assert out.stats[2] == Stats((2, 2), (2, 0), replaced=2, bonus=1, forwards=3)


def test_a_used_pyramid_answers_as_a_fresh_one():
    """No context, whatever was asked before, leaves anything behind in a cache."""
    used = pyramid(tables(3), num_draft_tokens=[2, 4])
    for seed, context in enumerate([[0, 1, 2, 0, 1], [0, 2, 2, 0, 1], [0, 2], [0, 2, 2, 1, 1, 0, 0], [1]]):
        fresh = pyramid(tables(3), num_draft_tokens=[2, 4]).draft(context, 12, Rng(seed))
        again = used.draft(context, 12, Rng(seed))
        assert again.tokens == fresh.tokens
        assert torch.equal(again.laws.probs, fresh.laws.probs)


# Bad models and bad stacks.


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_model_that_answers_nan_is_an_error_under_every_rule(rule: Rule, temperature: float):
    broken = TableModel(3, lambda context: [0.5, math.nan, 0.5])
    top = pyramid([tables(1)[0], broken], [rule], sampling=Sampling(temperature=temperature))
    with pytest.raises(NumberError, match="NaN"):
        top.draft([0], 5, Rng())


def test_a_pyramid_that_cannot_be_built_is_refused():
    draft, target = tables(2)
    for build in (
        lambda: pyramid([]),
        lambda: pyramid([target, PromptLookup()]),
        lambda: pyramid([draft, PromptLookup(), target]),
        lambda: pyramid([draft, target], rules=[]),
        lambda: pyramid([draft, target], num_draft_tokens=[1, 2]),
        lambda: pyramid([draft, target], num_draft_tokens=[0]),
        lambda: pyramid([TableModel(2, uniform), target]),
    ):
        with pytest.raises(UsageError):
            build()
