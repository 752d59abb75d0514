"""Prompt lookup against a brute-force search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyramidsd import PromptLookup, Rng, Stats, UsageError
from pyramidsd.drafters import NoDraft


def looked_up(context: list[int], n: int, max_ngram: int, min_ngram: int) -> list[int]:
    """The oracle: every start of every n-gram length, the longest and then the latest first."""
    for size in range(max_ngram, min_ngram - 1, -1):
        for start in range(len(context) - size - 1, -1, -1):
            if context[start : start + size] == context[-size:]:
                grown = list(context)
                for i in range(n):
                    grown.append(grown[start + size + i])
                return grown[len(context) :]
    return []


# 256 shifted by one byte is 1, 65536 is 256 and so on: a search over bytes must not take one for the other.
TRAPS = [0, 1, 256, 257, 65536, 65537]
contexts = st.sampled_from([[0, 1, 2], [0, 1, 256], TRAPS]).flatmap(
    lambda ids: st.lists(st.sampled_from(ids), max_size=25)
)
ngrams = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted)


@settings(deadline=None, max_examples=250)
@given(context=contexts, n=st.integers(0, 12), ngram=ngrams)
@example(context=[0, 256, 0], n=2, ngram=[1, 1])
@example(context=[256, 0, 1], n=3, ngram=[1, 1])
@example(context=[1, 256, 1], n=3, ngram=[1, 3])
@example(context=[0, 256, 0, 1], n=3, ngram=[1, 1])
@example(context=[1, 0, 256, 0, 1], n=2, ngram=[1, 2])
@example(context=[], n=4, ngram=[1, 3])
@example(context=[5], n=4, ngram=[1, 3])
def test_lookup_finds_what_brute_force_finds(context: list[int], n: int, ngram: list[int]):
    smallest, largest = ngram
    before = list(context)
    draft = PromptLookup(largest, smallest).draft(context, n, Rng())
    assert draft.tokens == looked_up(context, n, largest, smallest)
    assert context == before

    size = len(draft.tokens)
    assert draft.laws.probs.sum().item() == size
    assert [draft.laws.probs[i, token].item() for i, token in enumerate(draft.tokens)] == [1] * size
    if size:
        assert torch.equal(draft.laws.logits, draft.laws.probs.log())
    assert draft.origin == [0] * size
    assert draft.deviation.tolist() == [0] * size
    assert draft.stats == (Stats(),)


def test_a_loop_is_drafted_whole():
    assert PromptLookup().draft([9, 1, 2, 3, 1, 2, 3], 8, Rng()).tokens == [1, 2, 3, 1, 2, 3, 1, 2]
    assert PromptLookup().draft([4, 4], 5, Rng()).tokens == [4] * 5


def test_the_longest_and_then_the_latest_ngram_decides():
    context = [1, 2, 3, 7, 2, 3, 8, 3, 9, 1, 2, 3]
    for max_ngram, token in ((3, 7), (2, 8), (1, 9)):
        assert PromptLookup(max_ngram).draft(context, 1, Rng()).tokens == [token]
    assert PromptLookup(3, min_ngram=3).draft(context[1:], 1, Rng()).tokens == []  # 1 2 3 occurs once


def test_a_long_context_is_answered():
    """32 k tokens, all of them byte-wise traps, with the only match at the very start."""
    context = [7, 8, 9, 10] + [256, 65536] * 16_382 + [7, 8, 9]
    assert len(context) == 32_771
    assert PromptLookup().draft(context, 3, Rng()).tokens == [10, 256, 65536]
    assert PromptLookup().draft([*context[4:-3], 1], 3, Rng()).tokens == []


def test_no_draft_is_empty():
    assert len(NoDraft().draft([1, 2], 5, Rng())) == 0


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(0, 0), (3, 0), (2, 3), (-1, -2)])
def test_ngram_lengths_out_of_range_are_refused(max_ngram: int, min_ngram: int):
    with pytest.raises(UsageError, match="min_ngram"):
        PromptLookup(max_ngram, min_ngram)
