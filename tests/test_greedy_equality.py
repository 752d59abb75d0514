"""Exact pyramids at temperature 0 say what transformers' own `generate(do_sample=False)` says, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

import tiny
from pyramidsd import Level, Lossless, Match, PromptLookup, Rng, Sampling, pyramid
from pyramidsd.accept import Rule
from pyramidsd.models.base import Model
from pyramidsd.models.hf import TransformersModel, first_layers
from pyramidsd.types import Drafter, Stats, add_stats

FAMILIES = ["llama", "qwen2-sliding", "mistral-sliding", "gemma2", "gemma3", "gpt2"]
NUM_TOKENS = 40
GREEDY = Sampling(temperature=0)

lm = cache(tiny.causal_lm)
FIRST, SECOND = tiny.prompts(2, seed=1)
PROMPTS = [FIRST, SECOND * 2]  # the second has something to look up


@cache
def expected(family: str) -> list[list[int]]:
    return [tiny.plain(lm(family), prompt, NUM_TOKENS) for prompt in PROMPTS]


def pyramids(family: str) -> Iterator[Level]:
    target = TransformersModel(lm(family))
    stranger = TransformersModel(lm("llama", seed=5))
    near, nearer = (TransformersModel(tiny.relative(lm(family), noise)) for noise in (0.05, 0.02))
    settings: list[tuple[list[Model | Drafter], list[Rule], list[int]]] = [
        ([], [], []),
        ([stranger], [Lossless()], [2]),
        ([near], [Lossless()], [9]),
        ([near], [Match()], [1]),
        ([first_layers(target, 2)], [Match()], [4]),
        ([PromptLookup()], [Lossless()], [6]),
        ([near, nearer], [Lossless(), Lossless()], [2, 7]),
        ([near, nearer], [Match(), Lossless()], [6, 2]),
        ([stranger, nearer], [Lossless(), Match()], [1, 4]),
        ([PromptLookup(), near], [Match(), Match()], [3, 5]),
    ]
    for lower, rules, windows in settings:
        yield pyramid([*lower, target], rules, windows, GREEDY)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_pyramids_say_what_generate_says(family: str) -> None:
    seen: tuple[Stats, ...] = ()
    for top in pyramids(family):
        for prompt, answer in zip(PROMPTS, expected(family), strict=True):
            draft = top.draft(prompt, NUM_TOKENS, Rng())
            assert draft.tokens == answer
            assert draft.deviation.abs().max() == 0
            seen = add_stats(seen, draft.stats[-1:])
    # Drafts were kept whole and cut short, or the comparison would have shown little.
    assert min(seen[0].accepted, seen[0].replaced, seen[0].bonus) > 50


def two_and_three_levels(target: Model, sampling: Sampling = GREEDY, **settings: frozenset[int]) -> list[Level]:
    model = lm("llama")
    near, nearer = (TransformersModel(tiny.relative(model, noise)) for noise in (0.05, 0.02))
    return [
        pyramid([near, target], None, [6], sampling, **settings),
        pyramid([near, nearer, target], None, [3, 7], sampling, **settings),
        pyramid([PromptLookup(), nearer, target], None, [3, 7], sampling, **settings),
    ]


@pytest.mark.parametrize("position", [0, 1, 5, 6, 17])
def test_an_end_token_ends_the_answer_wherever_it_falls(position: int) -> None:
    model = lm("llama")
    for prompt, answer in zip(PROMPTS, expected("llama"), strict=True):
        end = answer[position]
        stopped = tiny.plain(model, prompt, NUM_TOKENS, eos_token_id=end, pad_token_id=0)
        assert stopped == answer[: answer.index(end) + 1]
        for top in two_and_three_levels(TransformersModel(model), stop_tokens=frozenset({end})):
            assert top.draft(prompt, NUM_TOKENS, Rng()).tokens == stopped


def test_the_models_own_end_token_counts() -> None:
    """Set in the config, as checkpoints do; `generate` reads it from there too."""
    end = expected("llama")[0][8]
    model = tiny.causal_lm("llama", eos_token_id=end)
    for prompt in PROMPTS:
        stopped = tiny.plain(model, prompt, NUM_TOKENS, pad_token_id=0)
        for top in two_and_three_levels(TransformersModel(model)):
            assert top.draft(prompt, NUM_TOKENS, Rng()).tokens == stopped
    assert len(tiny.plain(model, PROMPTS[0], NUM_TOKENS, pad_token_id=0)) < NUM_TOKENS


def test_a_repetition_penalty_sees_every_prefix() -> None:
    """Drafted tokens of the same window included."""
    model = lm("llama")
    sampling = Sampling(temperature=0, processors=(RepetitionPenaltyLogitsProcessor(1.3),))
    answer = tiny.plain(model, SECOND, NUM_TOKENS, repetition_penalty=1.3)
    assert answer != tiny.plain(model, SECOND, NUM_TOKENS)
    for top in two_and_three_levels(TransformersModel(model), sampling):
        assert top.draft(SECOND, NUM_TOKENS, Rng()).tokens == answer


@pytest.mark.parametrize("windows", [[3], [3, 5]], ids=["two levels", "three levels"])
def test_the_long_rotation_of_phi3_begins_where_generate_begins_it(windows: list[int]) -> None:
    """Past its original context Phi-3 turns all its keys by other angles, those in the cache too."""
    model = lm("phi3-longrope")
    lower = [TransformersModel(tiny.relative(model, noise)) for noise in (0.05, 0.02)]
    top = pyramid([*lower[: len(windows)], TransformersModel(model)], None, windows, GREEDY)
    for prompt in ([1, 2, 3], list(range(tiny.LONG_ROPE - 1)), list(range(tiny.LONG_ROPE + 9))):
        assert top.draft(prompt, NUM_TOKENS, Rng()).tokens == tiny.plain(model, prompt, NUM_TOKENS)


GAP = 0.15  # in logits: rows of one bfloat16 forward and of windows of it differ by up to 0.06 here


def test_bfloat16_answers_are_best_up_to_rounding() -> None:
    """Never token equality: each token must be the argmax of the answer fed back, or within `GAP` of it. The
    second best token lies further away in most places, so the allowance is a narrow one."""
    model = tiny.causal_lm("llama", dtype=torch.bfloat16)
    near = TransformersModel(tiny.relative(model, 0.02))
    top = pyramid([near, TransformersModel(model)], None, [6], GREEDY)
    margins = []
    for prompt in PROMPTS:
        answer = top.draft(prompt, NUM_TOKENS, Rng()).tokens
        rows = tiny.fresh_rows(model, prompt + answer)[len(prompt) - 1 : -1].float()
        best, second = rows.topk(2).values.unbind(-1)
        chosen = rows.gather(-1, torch.tensor(answer).unsqueeze(-1)).squeeze(-1)
        assert (best - chosen).max() <= GAP
        margins.append(best - second)
    assert torch.cat(margins).median() > 2 * GAP
