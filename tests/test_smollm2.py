"""The whole engine on a real model: SmolLM2-135M-Instruct under its own first layers and prompt lookup."""

from functools import cache

import pytest
import torch
from scipy.stats import chi2

from pyramidsd import Fuzzy, Lossless, Match, PromptLookup, Rng, Sampling, pyramid
from pyramidsd.models.base import Model
from pyramidsd.models.embedded import folder, is_fetched
from pyramidsd.models.hf import TransformersModel, first_layers, load_model

NAME = "smollm2-135m"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not is_fetched(NAME), reason=f"fetch it with: pyramidsd models --fetch {NAME}"),
]

GREEDY = Sampling(temperature=0)
PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "A train leaves at 9:40 and arrives at 11:05. How many minutes does it take?",
    "List ten animals that live in the sea, one per line.",
    "Translate to French: The cat sleeps on the warm stone wall.",
    "Summarise in one sentence: The river rose for three days. On the fourth, the bridge was closed and the villagers "
    "crossed by boat until the water fell again.",
    "Write a short poem about winter.",
    "What are the pros and cons of working from home?",
    "Repeat this five times: one two three four five six seven.",
    "Correct the grammar: she don't know where is the keys of the car.",
    "Give me a recipe for pancakes with exact amounts.",
    "Explain what a hash table is to a ten-year-old.",
    "def quicksort(items):\n    # complete this function\n",
    "Fill in JSON with name, age and city for three people.",
    "Who wrote Hamlet, and when?",
    "Dialogue between a baker and a customer who wants rye bread.",
    "What is 17 * 23? Show the steps.",
    "Write an SQL query that counts the orders of each customer in the table orders.",
    "Erkläre kurz, was Photosynthese ist.",
    "🙂 What does this emoji mean, and when do people use it?",
]
FEW = PROMPTS[:3]
LONG = [pytest.param(prompt, marks=pytest.mark.slow) for prompt in PROMPTS[len(FEW) :]]


@cache
def target(dtype: str = "float32") -> TransformersModel:
    return load_model(folder(NAME), dtype=dtype, device="cpu")


@cache
def shortened(num_layers: int, dtype: str = "float32") -> TransformersModel:
    return first_layers(target(dtype), num_layers)


@cache
def encoded(prompt: str) -> tuple[int, ...]:
    chat = [{"role": "user", "content": prompt}]
    return tuple(
        target().tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


@cache
def transformers_greedy(prompt: str, num_tokens: int) -> list[int]:
    ids = torch.tensor([encoded(prompt)])
    answer = target().model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return answer[0, ids.shape[1] :].tolist()


STACKS = {
    "sd, window 1": lambda dtype: ([PromptLookup(), target(dtype)], [1]),
    "sd, window 8": lambda dtype: ([PromptLookup(), target(dtype)], [8]),
    "nested, windows 4 and 3": lambda dtype: ([PromptLookup(), shortened(24, dtype), target(dtype)], [4, 3]),
    "nested, windows 2 and 7": lambda dtype: ([PromptLookup(), shortened(12, dtype), target(dtype)], [2, 7]),
    "nested, three models": lambda dtype: ([shortened(4, dtype), shortened(20, dtype), target(dtype)], [2, 4]),
}


@pytest.mark.parametrize("prompt", [*FEW, *LONG])
@pytest.mark.parametrize("stack", STACKS)
def test_greedy_answers_are_those_of_transformers_generate(stack, prompt):
    models, windows = STACKS[stack]("float32")
    top = pyramid(models, [Lossless()] * len(windows), windows, GREEDY)
    assert top.draft(list(encoded(prompt)), 64, Rng()).tokens == transformers_greedy(prompt, 64)


@pytest.mark.parametrize("prompt", FEW)
@pytest.mark.parametrize("stack", ["sd, window 8", "nested, windows 4 and 3"])
def test_bfloat16_answers_stay_within_a_small_gap_of_the_argmax(stack, prompt):
    """Feeding the answer back in one pass, every token's logit is within 0.5 of the largest: 8 bits of mantissa
    leave steps of 0.125 at logits of 16 to 32, and a window is summed in another order than a single token."""
    models, windows = STACKS[stack]("bfloat16")
    context = list(encoded(prompt))
    tokens = pyramid(models, [Lossless()] * len(windows), windows, GREEDY).draft(context, 32, Rng()).tokens
    with torch.inference_mode():
        rows = target("bfloat16").model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1].float()
    gaps = rows.amax(-1) - rows.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)
    assert gaps.max() <= 0.5


@pytest.mark.parametrize("tau", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("prompt", [FEW[0], *[pytest.param(p, marks=pytest.mark.slow) for p in PROMPTS[1:3]]])
def test_psd_a_at_temperature_zero_is_fsd_with_the_qualifier_as_drafter(prompt, num_draft_tokens, tau):
    qualifier, context = shortened(24), list(encoded(prompt))
    psd_a = pyramid([PromptLookup(), qualifier, target()], [Match(), Fuzzy(tau)], [num_draft_tokens, 5], GREEDY).draft(
        context, 40, Rng()
    )
    fsd = pyramid([qualifier, target()], [Fuzzy(tau)], [5], GREEDY).draft(context, 40, Rng())
    assert psd_a.tokens == fsd.tokens
    assert psd_a.stats[-1] == fsd.stats[-1]


class Remembered(Model):
    """The rows of a real model, computed once per question, so that thousands of draws are affordable."""

    def __init__(self, model: TransformersModel) -> None:
        self.vocab_size, self.vocabulary = model.vocab_size, model.vocabulary
        self._rows = cache(lambda context, n: model.logits(list(context), n))

    def logits(self, context, n):
        return self._rows(tuple(context), n)


@pytest.mark.statistical
def test_sampled_second_tokens_have_the_law_of_the_target():
    """Chi-square over 2,000 draws at temperature 1 with top-k 4, three levels; false alarms: one in a million."""
    sampling = Sampling(temperature=1, top_k=4)
    context = target().tokenizer("The old lighthouse keeper")["input_ids"]
    models = [Remembered(model) for model in (shortened(4), shortened(24), target())]
    top = pyramid(models, [Lossless()] * 2, [1, 2], sampling, stop_tokens=frozenset())

    first = sampling.laws(target().logits(context, 1), context).probs[0].double()
    expected = torch.zeros_like(first)
    for token in first.nonzero().flatten().tolist():
        after = [*context, token]
        expected += first[token] * sampling.laws(target().logits(after, 1), after).probs[0]

    rng = Rng(seed=20261201)
    answers = [top.draft(context, 4, rng) for _ in range(2000)]
    drawn = torch.tensor([answer.tokens[1] for answer in answers]).bincount(minlength=len(expected)).double()
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    statistic = ((drawn - 2000 * expected)[possible] ** 2 / (2000 * expected[possible])).sum().item()
    assert statistic < chi2.isf(1e-6, int(possible.sum()) - 1)
    accepted = sum(answer.stats[-1].accepted for answer in answers)
    assert 200 < accepted < sum(answer.stats[-1].proposed for answer in answers)  # both verdicts really happen
