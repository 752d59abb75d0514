"""Settings that answer the same prompts under the same clock: pyramids, and the baselines of transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pyramidsd.accept import Fuzzy
from pyramidsd.config import METHODS, PROMPT_LOOKUP, Loader, PyramidConfig, stack
from pyramidsd.generate import Chunk, Message, encode, generate
from pyramidsd.level import Level
from pyramidsd.models.base import CachedModel
from pyramidsd.tools.meter import Clock, measured
from pyramidsd.tools.prompts import Prompt
from pyramidsd.tools.records import Record
from pyramidsd.types import Laws, Stats, UsageError, add_stats

PEERS = {
    "hf-plain": "plain decoding by transformers' own generate",
    "hf-assisted": "transformers' assisted generation with the model below the target as its draft",
    "hf-prompt-lookup": "transformers' prompt lookup",
}
"""Baselines by another library, and what they are."""

PEER_WINDOWS = (2, 4, 8, 20)
"""The numbers of drafted tokens among which the windows of the last two are tuned; 20 is transformers' default."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing to run.

    Attributes:
        method: a name from `METHODS` or `PEERS`.
        config: the pyramid. For a peer its models, dtype, device and sampling count.
        num_assistant_tokens: the window of a peer.
    """

    method: str
    config: PyramidConfig
    num_assistant_tokens: int = PEER_WINDOWS[-1]

    @staticmethod
    def of(method: str, config: PyramidConfig) -> Setting:
        """The setting of a method on the models of `config`.

        Raises:
            UsageError: no such method, or the models are too few for it.
        """
        if method in METHODS:
            return Setting(method, replace(config, method=method))
        if method not in PEERS:
            raise UsageError(f"unknown method {method!r}; choose from {', '.join([*METHODS, *PEERS])}")
        if method != "hf-assisted":
            return Setting(method, replace(config, method="plain"))
        if len(config.models) < 2 or config.models[-2] == PROMPT_LOOKUP:
            raise UsageError("hf-assisted needs a draft model below the target; name one, or leave it out")
        pair = replace(
            config,
            method="sd",
            models=config.models[-2:],
            num_draft_tokens=config.num_draft_tokens[-1:],
            thresholds=config.thresholds[-1:],
        )
        return Setting(method, pair)

    @property
    def name(self) -> str:
        """Its method, and what tells it from other settings of the method."""
        if self.method in PEERS:
            return self.method
        rules = self.config.rules()
        parts = [self.method]
        if rules:
            parts += ["+".join(Path(name).name for name in self.models[:-1])]
            parts += ["l=" + ",".join(map(str, self.config.num_draft_tokens[: len(rules)]))]
        fuzzy = [rule for rule in rules if isinstance(rule, Fuzzy)]
        if fuzzy:
            parts += ["tau=" + ",".join(f"{rule.threshold:g}" for rule in fuzzy)]
            parts += [self.config.divergence] if self.config.divergence != "js" else []
        return " ".join(parts)

    @property
    def models(self) -> list[str]:
        """The names of the models that it uses, lowest first."""
        return METHODS[self.config.method].pick(self.config.models)

    def line(self) -> dict[str, Any]:
        """What a record says about it; windows and thresholds only where they are used."""
        rules = self.config.rules()
        sampling = asdict(self.config.sampling)
        del sampling["processors"]
        return {
            "name": self.name,
            "method": self.method,
            "models": [Path(model).name for model in self.models],
            "num_draft_tokens": self.config.num_draft_tokens[: len(rules)],
            "thresholds": [rule.threshold for rule in rules if isinstance(rule, Fuzzy)],
            "divergence": self.config.divergence,
            "dtype": self.config.dtype,
            "device": self.config.device,
            "sampling": sampling,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    """What one setting said to one prompt, and what it took.

    Attributes:
        turns: for each turn its chunks, without laws; a peer gives one chunk with tokens and text only.
        stats: counters of all turns, one entry per level, lowest first; none for a peer.
        clock: over all turns, one entry per model of the setting. A record has `passes`: for each model the widths of
            its forwards in tokens, how many there were, and their seconds.
    """

    turns: list[list[Chunk]]
    stats: tuple[Stats, ...]
    clock: Clock

    @property
    def chunks(self) -> list[Chunk]:
        """Of all turns."""
        return [chunk for turn in self.turns for chunk in turn]

    @property
    def texts(self) -> list[str]:
        """One answer per turn."""
        return ["".join(chunk.text for chunk in turn) for turn in self.turns]

    def line(self) -> dict[str, Any]:
        """What a record says about it."""
        return {
            "turn_lengths": [sum(len(chunk.token_ids) for chunk in turn) for turn in self.turns],
            "token_ids": [token for chunk in self.chunks for token in chunk.token_ids],
            "pieces": [piece for chunk in self.chunks for piece in chunk.pieces],
            "origin": [level for chunk in self.chunks for level in chunk.origin],
            "deviation": [round(value, 6) for chunk in self.chunks for value in chunk.deviation],
            "finish_reason": self.chunks[-1].finish_reason,
            "seconds": round(self.clock.seconds, 6),
            "passes": [
                [[width, count, round(seconds, 6)] for width, (count, seconds) in sorted(model.widths.items())]
                for model in self.clock.passes
            ],
            "stats": [asdict(level) for level in self.stats],
        }


class Contest:
    """Settings with their models loaded, each model once.

    Raises:
        UsageError: a model cannot be loaded, the models of a setting do not go together, or the targets differ.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        self._loader = Loader()
        self._models: dict[str, list[Any]] = {}
        self._tops: dict[str, Level] = {}
        for setting in settings:
            self.enter(setting)

    @property
    def target(self) -> Any:
        """The model that all settings speed up."""
        return next(iter(self._models.values()))[-1]

    def enter(self, setting: Setting) -> None:
        """One more setting.

        Raises:
            UsageError: as for the class.
        """
        models = self._loader.models(setting.config)
        top = stack(setting.config, models)
        if self._models and models[-1] is not self.target:
            raise UsageError("all settings must have the same target; run the others apart")
        self._models[setting.name], self._tops[setting.name] = models, top

    def models(self, setting: Setting) -> Sequence[Any]:
        """Its models, lowest first."""
        return self._models[setting.name]

    def megabytes(self, setting: Setting) -> float:
        """The weights of its models, shared ones counted once."""
        modules = [model.model for model in self._models[setting.name] if hasattr(model, "model")]
        weights = {weight.data_ptr(): weight.nbytes for module in modules for weight in module.parameters()}
        return float(sum(weights.values()) / 1e6)

    def reply(
        self,
        setting: Setting,
        prompt: Prompt,
        max_new_tokens: int,
        seed: int = 0,
        watch: Callable[[Chunk], None] = lambda _chunk: None,
    ) -> Reply:
        """Answer every turn of a prompt, from empty caches.

        Args:
            watch: is shown every chunk; chunks are kept without their laws, which are large.

        Raises:
            UsageError: a prompt does not fit the context of a model.
        """
        models = self._models[setting.name]
        for model in models:
            if isinstance(model, CachedModel):
                model.forget()
        answer = self._peer if setting.method in PEERS else self._pyramid
        chat, turns = list(prompt.messages), []
        stats: tuple[Stats, ...] = ()
        with measured(models) as clock:
            for followup in (*prompt.followups, None):
                turn = []
                for chunk in answer(setting, self.request(chat), max_new_tokens, seed):
                    watch(chunk)
                    turn.append(replace(chunk, laws=Laws.empty()))
                turns.append(turn)
                stats = add_stats(stats, turn[-1].stats)
                if followup is not None:
                    said = "".join(chunk.text for chunk in turn)
                    chat += [{"role": "assistant", "content": said}, {"role": "user", "content": followup}]
        return Reply(turns, stats, clock)

    def request(self, chat: Sequence[Message]) -> str | Sequence[Message]:
        """A chat as the target's tokenizer takes it."""
        if self.target.tokenizer is None or self.target.tokenizer.chat_template:
            return chat
        return "\n\n".join(message["content"] for message in chat)

    def first_turn(self, prompt: Prompt, answer: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """The tokens of a prompt and of the first answer to it, out of a record's line; of a dialogue the rest would
        need the contexts of all turns."""
        context = encode(self.target.tokenizer, self.request(prompt.messages))
        return context, answer["token_ids"][: answer["turn_lengths"][0]]

    def _pyramid(self, setting: Setting, request: Any, max_new_tokens: int, seed: int) -> Iterator[Chunk]:
        return generate(self._tops[setting.name], self.target.tokenizer, request, max_new_tokens, seed)

    def _peer(self, setting: Setting, request: Any, max_new_tokens: int, seed: int) -> Iterator[Chunk]:
        tokenizer, model = self.target.tokenizer, self.target.model
        context = encode(tokenizer, request)
        ids = torch.tensor([context], device=model.device)
        torch.manual_seed(seed)
        with _peer_options(setting, self._models[setting.name]) as options:
            config = type(model.generation_config)(
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(self.target.stop_tokens) or None,
                pad_token_id=min(self.target.stop_tokens, default=0),
                **_sampling_options(setting.config),
            )
            made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **options)
        tokens = made[0, len(context) :].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        pieces = [text, *[""] * (len(tokens) - 1)]
        ended = "stop" if self.target.stop_tokens.intersection(tokens[-1:]) else "length"
        yield Chunk(tokens, pieces, [], [], Laws.empty(), ended, ())


def _sampling_options(config: PyramidConfig) -> dict[str, Any]:
    sampling = config.sampling
    if sampling.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
    }


@contextmanager
def _peer_options(setting: Setting, models: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Arguments of transformers' generate. Assisted generation reads its window from the draft's own generation
    config and from nowhere else, so that is lent another one for the time."""
    window = setting.num_assistant_tokens
    if setting.method == "hf-plain":
        yield {}
    elif setting.method == "hf-prompt-lookup":
        yield {"prompt_lookup_num_tokens": window}
    else:
        draft = models[0].model
        kept = draft.generation_config
        draft.generation_config = type(kept)(
            **kept.to_diff_dict() | {"num_assistant_tokens": window, "num_assistant_tokens_schedule": "constant"}
        )
        try:
            yield {"assistant_model": draft}
        finally:
            draft.generation_config = kept


def pending(
    settings: Sequence[Setting], prompts: Sequence[Prompt], rounds: int, record: Record
) -> list[tuple[Setting, int, int]]:
    """What a record lacks: (setting, index of the prompt, round). Settings take turns, and another one begins each
    time, so that no drift of the machine favours any."""
    done = {(line["setting"], line["prompt"], line["round"]) for line in record.of_kind("answer")}
    return [
        (setting, i, round_)
        for round_ in range(rounds)
        for i, prompt in enumerate(prompts)
        for start in [(round_ * len(prompts) + i) % len(settings)]
        for setting in [*settings[start:], *settings[:start]]
        if (setting.name, prompt.id, round_) not in done
    ]
