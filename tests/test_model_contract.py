"""The contract of `Model`, over every adapter: whatever was asked before, the rows are those of a fresh forward."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from transformers import BertConfig, BertLMHeadModel, OpenAIGPTConfig, OpenAIGPTLMHeadModel, PreTrainedModel

import tiny
from pyramidsd.models.base import CachedModel
from pyramidsd.models.hf import TransformersModel, first_layers
from pyramidsd.models.table import TableModel
from pyramidsd.types import UsageError

lm = cache(tiny.causal_lm)  # read only: adapters keep their caches to themselves
FAMILIES = [family for family in tiny.FAMILIES if family != "phi3-longrope"]  # its rows depend on what follows them


@dataclass(frozen=True)
class Adapter:
    model: CachedModel
    fresh: Callable[[list[int]], torch.Tensor]  # context -> rows [len, V], without any cache
    tolerance: float = 1e-9


def table_adapter() -> Adapter:
    def law(context: list[int]) -> list[float]:
        draw = random.Random(repr(context))
        weights = [draw.random() for _ in range(tiny.VOCAB_SIZE)]
        return [weight / sum(weights) for weight in weights]

    def fresh(context: list[int]) -> torch.Tensor:
        laws = [law(context[:end]) for end in range(1, len(context) + 1)]
        return torch.tensor(laws, dtype=torch.float64).log()

    model = TableModel(tiny.VOCAB_SIZE, law)
    model.max_context = tiny.MAX_CONTEXT
    return Adapter(model, fresh)


def adapter(name: str) -> Adapter:
    """An adapter with an empty cache, and its oracle."""
    if name == "table":
        return table_adapter()
    if name.startswith("first-layers-"):
        family = name.removeprefix("first-layers-")
        return Adapter(
            first_layers(TransformersModel(lm(family)), 2),
            lambda context: tiny.fresh_rows(truncated(family, 2), context),
        )
    # Eager attention takes its softmax in float32.
    tolerance = 1e-5 if lm(name).config._attn_implementation == "eager" else 1e-9
    return Adapter(TransformersModel(lm(name)), lambda context: tiny.fresh_rows(lm(name), context), tolerance)


@cache
def truncated(family: str, num_layers: int) -> PreTrainedModel:
    """The first layers as a model of their own: a shorter config, and of the weights those that fit."""
    whole = lm(family)
    shorter = {"num_hidden_layers": num_layers}
    if getattr(whole.config, "layer_types", None):
        shorter["layer_types"] = whole.config.layer_types[:num_layers]
    model = tiny.causal_lm(family, seed=1, **shorter)
    weights = whole.state_dict()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


ADAPTERS = ["table", *FAMILIES, "first-layers-qwen2-sliding", "first-layers-gpt2"]
on_every_adapter = pytest.mark.parametrize("name", ADAPTERS)
on_every_family = pytest.mark.parametrize("family", FAMILIES)


def tokens(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(tiny.VOCAB_SIZE) for _ in range(length)]


def assert_fresh(subject: Adapter, context: list[int], n: int) -> None:
    rows = subject.model.logits(context, n)
    assert rows.shape == (n, subject.model.vocab_size)
    torch.testing.assert_close(rows, subject.fresh(context)[-n:], rtol=0, atol=subject.tolerance)


class Contexts(RuleBasedStateMachine):
    """Any walk through contexts, several windows long."""

    longest = 5 * tiny.WINDOW
    some_tokens = st.lists(st.integers(0, tiny.VOCAB_SIZE - 1), min_size=1, max_size=2 * tiny.WINDOW)
    a_number = st.integers(0, longest)

    def __init__(self, name: str) -> None:
        super().__init__()
        self.subject = adapter(name)
        self.context: list[int] = []

    def ask(self, number: int) -> None:
        assert_fresh(self.subject, self.context, 1 + number % len(self.context))

    @rule(more=some_tokens, number=a_number)
    def extend(self, more: list[int], number: int) -> None:
        self.context = (self.context + more)[-self.longest :]
        self.ask(number)

    @rule(keep=a_number, more=some_tokens, number=a_number)
    def diverge(self, keep: int, more: list[int], number: int) -> None:
        self.context = (self.context[:keep] + more)[: self.longest]
        self.ask(number)

    @precondition(lambda self: self.context)
    @rule(length=st.integers(1, longest), number=a_number)
    def shorten(self, length: int, number: int) -> None:
        self.context = self.context[:length]
        self.ask(number)

    @precondition(lambda self: self.context)
    @rule(number=a_number)
    def ask_again(self, number: int) -> None:
        self.ask(number)

    @rule(more=some_tokens, number=a_number)
    def start_over(self, more: list[int], number: int) -> None:
        self.context = [(token + 1) % tiny.VOCAB_SIZE for token in self.context[:1]] + more
        self.ask(number)


@on_every_adapter
def test_any_walk_through_contexts_gives_the_rows_of_a_fresh_forward(name: str) -> None:
    run_state_machine_as_test(
        lambda: Contexts(name), settings=settings(max_examples=12, stateful_step_count=12, deadline=None)
    )


def test_what_left_every_window_has_no_influence() -> None:
    """Known by construction: three layers of window 8 look back 22 tokens. So the oracle above does slide."""
    model = TransformersModel(lm("mistral-sliding"))
    context = tokens(40)
    reach = tiny.NUM_LAYERS * (tiny.WINDOW - 1) + 1
    row = model.logits(context, 1)
    for position, same in ((40 - reach - 1, True), (40 - reach, False)):
        changed = [*context[:position], (context[position] + 1) % tiny.VOCAB_SIZE, *context[position + 1 :]]
        assert torch.allclose(model.logits(changed, 1), row, rtol=0, atol=1e-12) == same


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.01)])
def test_rows_of_narrow_models_are_widened_to_float32(dtype: torch.dtype, tolerance: float) -> None:
    model = tiny.causal_lm("llama", dtype=dtype)
    rows = TransformersModel(model).logits(tokens(9), 3)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows, tiny.fresh_rows(model, tokens(9))[-3:].float(), rtol=0, atol=tolerance)


@contextmanager
def hooked(register: Callable[[Any], Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


@on_every_family
def test_one_forward_a_call_and_the_head_sees_only_the_rows_asked_for(family: str) -> None:
    model = TransformersModel(lm(family))
    forwards: list[int] = []
    heads: list[int] = []
    long = tokens(80)
    calls = [(long, 3), (long, 3), (long[:40] + tokens(20, seed=1), 1), (long[:1], 1), (long, 80)]
    with (
        hooked(model.model.register_forward_hook, lambda *_: forwards.append(1)),
        hooked(model.model.get_output_embeddings().register_forward_pre_hook, lambda _, x: heads.append(x[0].shape[1])),
    ):
        for context, n in calls:
            model.logits(context, n)
    assert len(forwards) == len(calls)
    assert heads == [n for _, n in calls]


def test_only_new_tokens_are_fed() -> None:
    """Counted at the embedding: the common prefix with the last context is kept, up to the rows asked for."""
    model = TransformersModel(lm("llama"))
    fed: list[int] = []
    context = tokens(30)
    with hooked(model.model.get_input_embeddings().register_forward_pre_hook, lambda _, x: fed.append(x[0].shape[1])):
        for asked, n in (
            (context[:20], 1),
            (context[:25], 6),
            (context, 2),
            (context[:22] + context[:3], 1),
            (context, 1),
        ):
            model.logits(asked, n)
    assert fed == [20, 6, 5, 3, 8]


class LawlessError(Exception):
    pass


@pytest.mark.parametrize("error", [LawlessError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [0, 10, 30], ids=["empty cache", "extending", "rolling back"])
@on_every_family
def test_an_interrupted_forward_leaves_the_model_right(family: str, before: int, error: type[BaseException]) -> None:
    """The last layer raises once, when the others have already grown their caches."""

    def interrupt(*_: object) -> None:
        raise error

    subject = adapter(family)
    context = tokens(20) if before < 20 else tokens(20)[:15] + tokens(5, seed=1)
    if before:
        subject.model.logits(tokens(before), 1)
    layers = next(m for m in lm(family).modules() if isinstance(m, torch.nn.ModuleList) and len(m) == tiny.NUM_LAYERS)
    with hooked(layers[-1].register_forward_pre_hook, interrupt), pytest.raises(error):
        subject.model.logits(context, 3)
    assert_fresh(subject, context, 3)
    assert_fresh(subject, context + tokens(4), 2)


@pytest.mark.parametrize("error", [LawlessError, KeyboardInterrupt])
def test_an_interrupted_table_is_right_afterwards(error: type[BaseException]) -> None:
    raising = [False]

    def law(context: list[int]) -> list[float]:
        if raising.pop() if raising else False:
            raise error
        return [len(context) / 100, 1 - len(context) / 100]

    model = TableModel(2, law)
    model.logits([0, 1, 0], 1)
    raising[:] = [True, False]
    with pytest.raises(error):
        model.logits([0, 1, 1, 0], 2)
    expected = torch.tensor([[0.03, 0.97], [0.04, 0.96]], dtype=torch.float64).log()
    torch.testing.assert_close(model.logits([0, 1, 1, 0], 2), expected)


@on_every_adapter
def test_bad_requests_are_refused_and_leave_the_model_right(name: str) -> None:
    subject = adapter(name)
    longest = tokens(tiny.MAX_CONTEXT)
    assert_fresh(subject, longest, 1)
    for context, n in ((longest, 0), (longest[:3], 4), ([], 1), ([], 0)):
        with pytest.raises(UsageError, match="at least one token"):
            subject.model.logits(context, n)
    with pytest.raises(UsageError, match=rf"97 tokens .* the model's {tiny.MAX_CONTEXT}; shorten the prompt"):
        subject.model.logits([*longest, 0], 1)
    assert_fresh(subject, longest, 2)


def snapshot(model: PreTrainedModel) -> tuple[Any, ...]:
    parts = {name: (id(part), type(part), len(part._forward_pre_hooks)) for name, part in model.named_modules()}
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    return copy.deepcopy(model.config.to_dict()), model.generation_config.to_dict(), parts, weights


@on_every_family
def test_the_users_model_stays_as_it_was(family: str) -> None:
    model = tiny.causal_lm(family)
    *before, weights = snapshot(model)
    whole = TransformersModel(model)
    part = first_layers(whole, 1)
    for subject in (whole, part, whole):
        subject.logits(tokens(20), 2)
        subject.logits(tokens(12), 2)
    *after, weights_after = snapshot(model)
    assert after == before
    assert weights.keys() == weights_after.keys()
    assert all(torch.equal(weights[name], weights_after[name]) for name in weights)


@pytest.mark.parametrize("num_layers", range(1, tiny.NUM_LAYERS + 1))
@on_every_family
def test_first_layers_equal_a_truncated_model_and_share_its_weights(family: str, num_layers: int) -> None:
    whole = TransformersModel(lm(family))
    part = first_layers(whole, num_layers)
    rows = part.logits(tokens(30), 10)
    torch.testing.assert_close(
        rows, tiny.fresh_rows(truncated(family, num_layers), tokens(30))[-10:], rtol=0, atol=1e-5
    )
    addresses = {name: weight.data_ptr() for name, weight in whole.model.state_dict().items()}
    shared = {name: weight.data_ptr() for name, weight in part.model.state_dict().items()}
    assert shared.items() <= addresses.items()
    assert shared.keys() == truncated(family, num_layers).state_dict().keys()


@pytest.mark.parametrize("num_layers", [-1, 0, tiny.NUM_LAYERS + 1])
def test_first_layers_must_exist(num_layers: int) -> None:
    with pytest.raises(UsageError, match="keep from 1 to 3 of them"):
        first_layers(TransformersModel(lm("llama")), num_layers)


_SMALL = {"vocab_size": tiny.VOCAB_SIZE, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(OpenAIGPTLMHeadModel(OpenAIGPTConfig(n_embd=32, n_head=4, n_layer=2)), id="GPT-1"),
        pytest.param(BertLMHeadModel(BertConfig(hidden_size=32, intermediate_size=48, **_SMALL)), id="BERT encoder"),
    ],
)
def test_a_model_that_remembers_no_tokens_is_refused(model: PreTrainedModel) -> None:
    """Fed only new tokens, such a model answers as if they were the whole context."""
    with pytest.raises(UsageError, match="use a decoder-only model"):
        TransformersModel(model).logits(tokens(5), 1)
