"""`Level`: verifies a drafter with a model and a rule, and is itself a drafter, so levels stack.

Invariants, each with a test:
1. A drafter reports the law each token was really drawn from.
2. A drafter may stop because of what it has emitted; it never discards a token for what it is.
3. A rule's memory, if any, depends on emitted tokens only, and is rolled back with them.
4. Randomness enters through one object with `coin(p)` and `choice(probs)`, passed in, seeded by the caller.
5. A model's cache follows the context asked about, by common prefix; no caller ever rolls back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyramidsd.accept import Lossless, Rule, emitted_law, total_variation
from pyramidsd.drafters import NoDraft
from pyramidsd.models.base import FittedModel, Model
from pyramidsd.sampling import Sampling
from pyramidsd.types import Draft, Drafter, Laws, Randomness, Stats, UsageError


@dataclass(frozen=True, slots=True)
class Level:
    """One model that verifies what its drafter proposes.

    Attributes:
        model: has the last word at this level.
        drafter: proposes; another level, a lookup, or nothing (plain decoding).
        rule: decides what is kept.
        num_draft_tokens: the window, in tokens asked of the drafter per round.
        sampling: how this level's rows become laws.
        stop_tokens: nothing is emitted after one of these.
    """

    model: Model
    drafter: Drafter = NoDraft()
    rule: Rule = Lossless()
    num_draft_tokens: int = 5
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise UsageError(f"a window must hold at least 1 token, got {self.num_draft_tokens}")

    def draft(self, context: list[int], n: int, rng: Randomness) -> Draft:
        """Exactly n tokens that continue `context`, fewer only after a stop token: rounds, the last one clipped."""
        rounds: list[Draft] = []
        emitted: list[int] = []
        while len(emitted) < n and not self.stop_tokens.intersection(emitted[-1:]):
            rounds.append(self.round(context + emitted, n - len(emitted), rng))
            emitted += rounds[-1].tokens
        if not rounds:  # nothing was asked for: no tokens, but an entry in `stats` for every level below
            return Draft(stats=(*self.drafter.draft(context, 0, rng).stats, Stats()))
        return Draft.join(rounds)

    def round(self, context: list[int], budget: int, rng: Randomness) -> Draft:
        """Draft, verify, extend: from 1 to `budget` tokens."""
        draft = self.drafter.draft(context, min(self.num_draft_tokens, budget - 1), rng)
        rows = self.model.logits(context + draft.tokens, len(draft) + 1)
        return self.verify(draft, self.sampling.laws(rows, context + draft.tokens), rng)

    def verify(self, draft: Draft, laws: Laws, rng: Randomness) -> Draft:
        """The accepted prefix of a draft of k tokens and one token more, given this level's k + 1 laws.

        The only place that walks a draft. After an accepted stop token nothing is added.
        """
        k, p, q = len(draft), laws[: len(draft)], draft.laws.like(laws)
        accept, residual = self.rule(p, q)
        drafted = torch.tensor(draft.tokens, dtype=torch.long, device=accept.device).unsqueeze(-1)
        kept = 0
        stopped = False
        for token, probability in zip(draft.tokens, accept.gather(-1, drafted).flatten().tolist(), strict=True):
            if not rng.coin(probability):
                break
            kept += 1
            if stopped := token in self.stop_tokens:
                break
        tokens, size = draft.tokens[:kept], kept
        if not stopped:
            tokens, size = [*tokens, rng.choice(residual[kept] if kept < k else laws.probs[k])], kept + 1

        law = torch.cat([emitted_law(q.probs[:size], accept[:size], residual[:size]), laws.probs[k:size]])
        own = Stats.of_round(
            proposed=kept if stopped else k,
            accepted=kept,
            replaced=int(not stopped and kept < k),
            bonus=int(not stopped and kept == k),
        )
        return Draft(
            tokens,
            Laws(laws.logits[:size], law),
            draft.origin[:kept] + [len(draft.stats)] * (size - kept),
            total_variation(law, laws.probs[:size]),
            (*draft.stats, own),
        )


def default_windows(boundaries: int) -> tuple[int, ...]:
    """5 tokens at the lowest boundary and three times more at each further one."""
    return tuple(5 * 3**i for i in range(boundaries))


def pyramid(
    models: Sequence[Model | Drafter],
    rules: Sequence[Rule] | None = None,
    num_draft_tokens: Sequence[int] | None = None,
    sampling: Sampling = Sampling(),
    stop_tokens: frozenset[int] | None = None,
) -> Level:
    """Stack models into levels, lowest first; the last one is the target.

    Args:
        models: the first may be a drafter without a model, such as `PromptLookup()`.
        rules: one per boundary, lowest first; `Lossless` everywhere unless given.
        num_draft_tokens: one window per boundary, lowest first; 5, 15, 45 ... unless given.
        sampling: used by every level.
        stop_tokens: the target's own unless given.

    Raises:
        UsageError: counts do not fit, or two models have different tokenizers.
    """
    if not models:
        raise UsageError("a pyramid needs at least one model: the target")
    *lower, target = models
    if not isinstance(target, Model):
        raise UsageError("the last entry must be a model: it is the target")
    boundaries = len(lower)
    rules = [Lossless()] * boundaries if rules is None else rules
    windows = default_windows(boundaries) if num_draft_tokens is None else num_draft_tokens
    for name, given in (("rules", rules), ("num_draft_tokens", windows)):
        if len(given) != boundaries:
            raise UsageError(f"{len(models)} models have {boundaries} boundaries, but {name} has {len(given)} entries")
    stops = target.stop_tokens if stop_tokens is None else stop_tokens

    def level(model: Model | Drafter, drafter: Drafter, rule: Rule, window: int) -> Level:
        if not isinstance(model, Model):
            raise UsageError("only the lowest entry can draft without a model")
        return Level(_fitted(model, target), drafter, rule, window, sampling, stops)

    bottom, *rest = models
    drafter = level(bottom, NoDraft(), Lossless(), 1) if isinstance(bottom, Model) else bottom
    for model, rule, window in zip(rest, rules, windows, strict=True):
        drafter = level(model, drafter, rule, window)
    assert isinstance(drafter, Level)
    return drafter


def _fitted(model: Model, target: Model) -> Model:
    """`model` over the target's vocabulary; refused where an id does not mean the same to both."""
    if model is target:
        return model
    own, wanted = model.vocabulary(), target.vocabulary()
    if own is not None and wanted is not None:
        for token_id in sorted(own.keys() & wanted.keys()):
            if own[token_id] != wanted[token_id]:
                raise UsageError(
                    f"two models have different tokenizers: id {token_id} is {own[token_id]!r} in one and "
                    f"{wanted[token_id]!r} in the target; use models of one family"
                )
    elif model.vocab_size != target.vocab_size:
        raise UsageError(
            f"a model has {model.vocab_size} tokens and the target {target.vocab_size}; give both their tokenizer, "
            "so that it can be checked whether only the padding differs"
        )
    return model if model.vocab_size == target.vocab_size else FittedModel(model, target.vocab_size)
