"""Text in, a stream of `Chunk` out: tokenise, decode round by round, cut at stop strings, detokenise."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pyramidsd.level import Level
from pyramidsd.sampling import Rng
from pyramidsd.types import Drafter, Laws, Stats, UsageError, add_stats

Message = Mapping[str, str]
"""One chat message: `role` and `content`."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any

    def __call__(self, text: str) -> Any:
        """A mapping with `input_ids`."""
        ...

    def apply_chat_template(self, conversation: Any, **settings: Any) -> Any:
        """A mapping with `input_ids`."""
        ...

    def decode(self, token_ids: Any, **settings: Any) -> Any:
        """The text."""
        ...

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """The vocabulary's own writing of one id."""
        ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round of the target added.

    Attributes:
        token_ids: new tokens, the one that ended the answer included.
        pieces: for each token the text that became certain with it, often empty inside a character.
        origin: for each token the index of the level that first proposed it, lowest level 0.
        deviation: for each token the total variation between its law and the target's, 0 where it is exact.
        laws: for each token the target's raw row and the law it was really drawn from.
        finish_reason: on the last chunk `stop` (a stop token or a stop string) or `length`; None before.
        stats: counters of the whole answer so far, one entry per level, lowest first.
    """

    token_ids: list[int]
    pieces: list[str]
    origin: list[int]
    deviation: list[float]
    laws: Laws
    finish_reason: str | None
    stats: tuple[Stats, ...]

    @property
    def text(self) -> str:
        """New text. All chunks together are exactly the decoded answer, without special tokens, up to a stop string."""
        return "".join(self.pieces)


def generate(
    top: Level,
    tokenizer: Tokenizer,
    prompt: str | Sequence[Message],
    max_new_tokens: int = 256,
    seed: int = 0,
    stop: str | Sequence[str] = (),
) -> Iterator[Chunk]:
    """Answer a prompt, one chunk per pass of the target.

    Args:
        top: the target's level, from `pyramid`.
        tokenizer: the models' transformers tokenizer.
        prompt: text to continue, or chat messages, which go through the tokenizer's chat template.
        max_new_tokens: an upper bound, at least 1.
        seed: the same seed gives the same answer on the same machine.
        stop: the answer ends before this string, or the first of these to be completed, wherever it lies.

    Raises:
        UsageError: before any work, for bad settings, an empty prompt, or one that does not fit a model's context.
    """
    stops = [stop] if isinstance(stop, str) else list(stop)
    check_limits(max_new_tokens, stops)
    context = encode(tokenizer, prompt)
    _check_room(top, len(context), max_new_tokens)
    return _stream(top, TextStream(tokenizer, stops), context, max_new_tokens, Rng(seed))


def check_limits(max_new_tokens: int, stop: Sequence[str]) -> None:
    """What can be refused before any model is loaded.

    Raises:
        UsageError: fewer than 1 new token, or an empty stop string.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if "" in stop:
        raise UsageError("a stop string must not be empty")


def encode(tokenizer: Tokenizer, prompt: str | Sequence[Message]) -> list[int]:
    """The token ids of a text or a chat.

    Raises:
        UsageError: nothing to continue, text that is no Unicode, or a chat for a tokenizer without a chat template.
    """
    try:
        "".join([prompt] if isinstance(prompt, str) else [message.get("content", "") for message in prompt]).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8; convert it first") from error
    if isinstance(prompt, str):
        if not prompt:
            raise UsageError("the prompt is empty; give at least one character")
        ids = tokenizer(prompt)["input_ids"]
    else:
        if not any(message.get("content") for message in prompt):
            raise UsageError("the chat holds no text; give at least one message with content")
        if not tokenizer.chat_template:
            raise UsageError("the tokenizer has no chat template; give the prompt as one string")
        ids = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)["input_ids"]
    if not ids:
        raise UsageError("the prompt has no tokens; give at least one character that the tokenizer knows")
    return list(ids)


def _check_room(top: Level, prompt_tokens: int, max_new_tokens: int) -> None:
    drafter: Drafter = top
    bounds = []
    while isinstance(drafter, Level):
        bounds += [drafter.model.max_context] if drafter.model.max_context is not None else []
        drafter = drafter.drafter
    room = min(bounds, default=prompt_tokens + max_new_tokens) - prompt_tokens
    if room < max_new_tokens:
        cure = f"lower max_new_tokens to at most {room}" if room > 0 else "shorten the prompt"
        raise UsageError(
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones are more than the smallest context of "
            f"the pyramid, {min(bounds)}; {cure}"
        )


def _stream(top: Level, text: TextStream, context: list[int], budget: int, rng: Rng) -> Iterator[Chunk]:
    stats: tuple[Stats, ...] = ()
    finish_reason = None
    while finish_reason is None:
        draft = top.round(context, budget, rng)
        stats = add_stats(stats, draft.stats)
        pieces = text.push(draft.tokens)
        used = len(pieces)
        context = context + draft.tokens[:used]
        budget -= used
        ended = text.stopped or bool(top.stop_tokens.intersection(draft.tokens[:used]))
        if ended or budget == 0:
            pieces[-1] += text.finish()
            finish_reason = "stop" if ended or text.stopped else "length"
        deviation = draft.deviation[:used].tolist()
        yield Chunk(
            draft.tokens[:used], pieces, draft.origin[:used], deviation, draft.laws[:used], finish_reason, stats
        )


class TextStream:
    """Tokens in, text out, cut before the first stop string.

    A token's text may depend on its neighbours: a character can be spread over several tokens, and some tokenizers
    write a space only between words. So text is decoded with the tokens of the last piece before it, and held back
    while it ends inside a character or where a stop string may have begun.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = list(stop)
        self._tokens: list[int] = []
        self._from, self._to = 0, 0  # tokens[from:to] is the last piece that was decoded, kept for its neighbours
        self._held = ""  # decoded text that may be the beginning of a stop string
        self._in_bytes = False
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> list[str]:
        """For each token the text that is certain now; fewer entries than tokens where one completed a stop string."""
        pieces: list[str] = []
        for token in tokens:
            self._tokens.append(token)
            pieces.append("" if self._inside_character(token) else self._pass(self._decoded()))
            if self.stopped:
                break
        return pieces

    def finish(self) -> str:
        """What was held back until now."""
        if self.stopped:
            return ""
        text = self._pass(self._decoded())
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _inside_character(self, token: int) -> bool:
        # A run of byte tokens is decoded as a whole, so nothing is certain before it ends; tokens that decode to
        # nothing, such as special ones, are skipped and do not end it.
        if re.fullmatch("<0x[0-9A-F]{2}>", self._tokenizer.convert_ids_to_tokens(token) or ""):
            self._in_bytes = True
        elif self._text([token]):
            self._in_bytes = False
        return self._in_bytes or self._text(self._tokens[self._from :]).endswith("\ufffd")

    def _decoded(self) -> str:
        before = self._text(self._tokens[self._from : self._to])
        text = self._text(self._tokens[self._from :])[len(before) :]
        if text:
            self._from, self._to = self._to, len(self._tokens)
        return text

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _pass(self, new: str) -> str:
        text = self._held + new
        found = [at for at in map(text.find, self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
