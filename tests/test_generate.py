"""`generate` and `TextStream`: the streamed text is the decoded answer, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pyramidsd import Chunk, Level, Sampling, generate, pyramid
from pyramidsd.generate import TextStream
from pyramidsd.models.table import TableModel
from pyramidsd.types import UsageError

few = settings(max_examples=150, deadline=None)

# Three ways to write text as tokens, built on the spot

CORPUS = [
    "the cat sat on the mat, and then it sat on the other mat.",
    "déjà vu, naïve façade, Straße",
    "日本語 日本 語学 中文",
    "👍🏽 👩‍👩‍👧 👍 🇫🇷",
    "stop here\n\nand go on\n",
]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2, Llama-3, Qwen: a token is some bytes, whole characters or not."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def byte_fallback(*, strip: bool) -> PreTrainedTokenizerFast:
    """Llama-2 (strip) and Gemma: `▁` is a space, and what has no token is written byte by byte."""
    words = ["▁", "▁▁", "▁the", "▁a", "▁b", "a", "b", "cat", "é", "日", "▁日", "👍", "\n", ".", "ing"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {name: token_id for token_id, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def llama2() -> PreTrainedTokenizerFast:
    return byte_fallback(strip=True)


@cache
def gemma() -> PreTrainedTokenizerFast:
    return byte_fallback(strip=False)


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """T5, XLNet: `▁` begins a word, no bytes."""
    words = ["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "▁s", "at", "é", "▁日", "本", "."]
    backend = Tokenizer(models.Unigram([(word, -float(i)) for i, word in enumerate(words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@cache
def wordpiece() -> PreTrainedTokenizerFast:
    """BERT: `##` continues a word, spaces are put between words when decoding."""
    words = [
        "[UNK]",
        "[SEP]",
        "the",
        "cat",
        "##s",
        "##ing",
        "play",
        "##é",
        "日",
        "##本",
        ".",
        ",",
        "do",
        "n't",
        "'",
        "##",
    ]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", sep_token="[SEP]", eos_token="[SEP]")


TOKENIZERS = {build.__name__: build for build in (byte_level, llama2, gemma, metaspace, wordpiece)}
on_every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    """The oracle of every stream."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def cut(tokens: list[int], lengths: list[int]) -> list[list[int]]:
    """`tokens` in pieces of these lengths, the rest as one."""
    ends = [0]
    for length in lengths:
        ends.append(min(len(tokens), ends[-1] + length))
    return [tokens[start:end] for start, end in pairwise([*ends, len(tokens)]) if start < end]


def streamed(stream: TextStream, pieces: list[list[int]]) -> tuple[str, int]:
    """Everything a stream says, and how many tokens it used."""
    text, used = "", 0
    for piece in pieces:
        texts = stream.push(piece)
        text, used = text + "".join(texts), used + len(texts)
        if stream.stopped:
            break
    return text + stream.finish(), used


a_length = st.lists(st.integers(1, 6), max_size=6)


def some_tokens(tokenizer: PreTrainedTokenizerFast) -> st.SearchStrategy[list[int]]:
    """Any ids, the special ones and one of a padded vocabulary included; words more often than bytes."""
    size = len(tokenizer)
    return st.lists(st.integers(0, size) | st.integers(max(0, size - 20), size - 1), max_size=16)


# Streams


@on_every_tokenizer
def test_a_stream_says_what_decode_says(name: str) -> None:
    tokenizer = TOKENIZERS[name]()

    @few
    @given(some_tokens(tokenizer), a_length)
    def check(tokens: list[int], lengths: list[int]) -> None:
        text, used = streamed(TextStream(tokenizer), cut(tokens, lengths))
        assert text == decoded(tokenizer, tokens)
        assert used == len(tokens)

    check()


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma"])
def test_characters_spread_over_tokens_arrive_whole(name: str) -> None:
    """Text of several scripts, encoded; the replacement character is never shown on the way."""
    tokenizer = TOKENIZERS[name]()

    @few
    @given(st.text("aé日👍🏽\u200d\n 語", max_size=12), a_length)
    def check(text: str, lengths: list[int]) -> None:
        tokens = tokenizer(text)["input_ids"]
        stream = TextStream(tokenizer)
        pieces = [text for piece in cut(tokens, lengths) for text in stream.push(piece)] + [stream.finish()]
        assert "".join(pieces) == decoded(tokenizer, tokens)
        assert "\ufffd" not in "".join(pieces)

    check()


def test_text_is_not_held_longer_than_a_character_needs() -> None:
    tokenizer = byte_level()
    tokens = [tokenizer.convert_tokens_to_ids(token) for token in ("a", "æ", "Ĺ", "¥", "b", "c")]  # a 日 b c
    assert TextStream(tokenizer).push(tokens) == ["a", "", "", "日", "b", "c"]


@pytest.mark.parametrize("name", ["llama2", "gemma"])
@pytest.mark.parametrize("run", [["<0xC3>", "</s>", "<0xA9>"], ["<0x41>", "<unk>", "<0x80>"]], ids=["é", "no text"])
def test_a_special_token_does_not_end_a_run_of_bytes(name: str, run: list[str]) -> None:
    """Decoding leaves it out, and reads the bytes around it as one run, valid as a whole or not at all."""
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer.convert_tokens_to_ids([*run, "a"])
    assert streamed(TextStream(tokenizer), [tokens]) == (decoded(tokenizer, tokens), len(tokens))


@on_every_tokenizer
def test_a_stop_string_cuts_where_it_begins(name: str) -> None:
    """The stop string is taken out of the text itself, so it may begin and end anywhere in a token."""
    tokenizer = TOKENIZERS[name]()

    @few
    @given(st.data(), some_tokens(tokenizer), a_length)
    def check(data: st.DataObject, tokens: list[int], lengths: list[int]) -> None:
        text = decoded(tokenizer, tokens)
        whole = [part for part in text.split("\ufffd") if part] or ["x"]  # half a character is no text to stop at
        part = data.draw(st.sampled_from(whole))
        start = data.draw(st.integers(0, len(part) - 1))
        stop = part[start : start + data.draw(st.integers(1, 6))] + data.draw(st.sampled_from(["", "", "x"]))
        stream = TextStream(tokenizer, [stop])
        seen, used = streamed(stream, cut(tokens, lengths))
        assert seen == (text[: text.find(stop)] if stop in text else text)
        assert stream.stopped == (stop in text)
        assert (stop in decoded(tokenizer, tokens[:used])) == stream.stopped

    check()


def letters() -> PreTrainedTokenizerFast:
    """Tokens of one to three letters `a`, `b`, `c`."""
    words = [x + y + z for x in "abc" for y in ["", *"abc"] for z in (["", *"abc"] if y else [""])]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "?"])}, unk_token="?"))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")


LETTERS = letters()


def ids(*words: str) -> list[int]:
    return LETTERS.convert_tokens_to_ids(list(words))


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, len(LETTERS) - 2), max_size=8),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    a_length,
)
@example(ids("a", "a", "a", "b"), ["aab"], [])
@example(ids("aa", "ab", "c"), ["aab"], [1])
@example(ids("ab", "ab", "ac"), ["abac", "bb"], [1, 1])
@example(ids("a", "b", "c"), ["abc", "b"], [])
def test_the_first_token_that_completes_a_stop_string_is_the_last(
    tokens: list[int], stops: list[str], lengths: list[int]
) -> None:
    """Several stop strings, overlapping themselves and each other. The oracle grows the text token by token."""
    texts = ["".join(LETTERS.convert_ids_to_tokens(tokens[:used])) for used in range(len(tokens) + 1)]
    hits = [used for used, text in enumerate(texts) if any(stop in text for stop in stops)]
    stream = TextStream(LETTERS, stops)
    seen = streamed(stream, cut(tokens, lengths))
    if hits:
        text = texts[hits[0]]
        assert seen == (text[: min(text.find(stop) for stop in stops if stop in text)], hits[0])
    else:
        assert seen == (texts[-1], len(tokens))
    assert stream.stopped == bool(hits)


# Answers


def scripted(script: Sequence[int], prompt_length: int, vocab_size: int) -> TableModel:
    """A model that says `script`, then only 0, wherever the prompt came from."""

    def law(context: list[int]) -> torch.Tensor:
        said = len(context) - prompt_length
        probs = torch.zeros(vocab_size, dtype=torch.float64)
        probs[script[said] if 0 <= said < len(script) else 0] = 1
        return probs

    return TableModel(vocab_size, law)


PROMPT = "the cat"


def speaker(tokenizer: PreTrainedTokenizerFast, script: Sequence[int], window: int = 4, wrong: int = 3) -> Level:
    """A pyramid that says `script` after `PROMPT`; its draft errs at every `wrong`-th token, so windows vary."""
    length, size = len(tokenizer(PROMPT)["input_ids"]), len(tokenizer) + 1
    erring = [(token + (i % wrong == wrong - 1)) % size for i, token in enumerate(script)]
    return pyramid([scripted(erring, length, size), scripted(script, length, size)], None, [window])


def check_answer(chunks: list[Chunk]) -> tuple[str, list[int], str | None]:
    """Text, tokens and finish reason of an answer whose chunks fit together."""
    for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.pieces) == len(chunk.origin) == len(chunk.deviation) > 0
        assert chunk.text == "".join(chunk.pieces)
        assert set(chunk.deviation) == {0.0}
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    text = "".join(chunk.text for chunk in chunks)
    return text, [token for chunk in chunks for token in chunk.token_ids], chunks[-1].finish_reason


@on_every_tokenizer
def test_an_answer_says_what_decode_says(name: str) -> None:
    tokenizer = TOKENIZERS[name]()

    @settings(max_examples=30, deadline=None)
    @given(some_tokens(tokenizer).filter(len), st.integers(1, 6), st.integers(1, 4))
    def check(script: list[int], window: int, wrong: int) -> None:
        chunks = list(generate(speaker(tokenizer, script, window, wrong), tokenizer, PROMPT, len(script)))
        assert check_answer(chunks) == (decoded(tokenizer, script), script, "length")
        origin = [level for chunk in chunks for level in chunk.origin]
        assert all(level == 1 for level in origin[wrong - 1 :: wrong])  # the target's corrections
        assert chunks[-1].stats[1].emitted == len(script)

    check()


def byte_script(text: str) -> list[int]:
    return byte_level()(text)["input_ids"]


@pytest.mark.parametrize("window", [1, 3, 12])
@pytest.mark.parametrize(
    ("text", "stop", "answer"),
    [
        ("the mat\n\nand then", ["\n\n"], "the mat"),
        ("the mat and then", ["t a"], "the ma"),
        ("the mat and then", ["zzz", "then", "and"], "the mat "),
        ("aaab and", ["aab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("日本語 日本", ["語"], "日本"),
        ("👍🏽👍", ["🏽"], "👍"),
        ("the mat", ["the"], ""),
        ("the mat", ["mats"], "the mat"),
        ("the mat", ["mat."], "the mat"),
    ],
)
def test_stop_strings_end_the_answer(text: str, stop: list[str], answer: str, window: int) -> None:
    tokenizer, script = byte_level(), byte_script(text)
    seen = check_answer(list(generate(speaker(tokenizer, script, window), tokenizer, PROMPT, len(script), stop=stop)))
    if any(s in text for s in stop):
        used = next(n for n in range(len(script) + 1) if any(s in decoded(tokenizer, script[:n]) for s in stop))
        assert seen == (answer, script[:used], "stop")
    else:
        assert seen == (text, script, "length")


def test_a_stop_string_found_at_the_very_end_is_the_reason() -> None:
    """A byte token is certain only when its run has ended, here with the answer."""
    tokenizer = llama2()
    script = tokenizer.convert_tokens_to_ids(["▁the", "<0x0A>"])
    chunks = list(generate(speaker(tokenizer, script), tokenizer, PROMPT, len(script), stop=["\n"]))
    assert check_answer(chunks) == ("the", script, "stop")


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 7])
def test_a_stop_token_ends_the_answer_and_is_not_shown(position: int) -> None:
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    script = byte_script("and then it sat on the other mat, the cat")
    script[position] = end
    length, size = len(tokenizer(PROMPT)["input_ids"]), len(tokenizer)
    models = [scripted(script, length, size), scripted(script, length, size)]
    top = pyramid(models, None, [3], stop_tokens=frozenset({end}))
    answer = check_answer(list(generate(top, tokenizer, PROMPT, 20)))
    assert answer == (decoded(tokenizer, script[:position]), script[: position + 1], "stop")


@pytest.mark.parametrize("window", [1, 2, 5, 12])
def test_no_more_than_max_new_tokens(window: int) -> None:
    tokenizer, script = byte_level(), byte_script("and then it sat on the other mat, the cat")
    for max_new_tokens in range(1, 11):
        top = speaker(tokenizer, script, window, wrong=7)
        answer = check_answer(list(generate(top, tokenizer, PROMPT, max_new_tokens)))
        assert answer == (decoded(tokenizer, script[:max_new_tokens]), script[:max_new_tokens], "length")


def test_a_seed_decides_the_answer() -> None:
    """Two levels that draw from different laws at temperature 1; 16 tokens of 20 could hardly agree by chance."""
    draft = TableModel(20, lambda context: [(1 + (i + len(context)) % 3) / 39 for i in range(18)] + [2 / 39, 1 / 39])
    target = TableModel(20, lambda context: [1 / 20] * 20)
    top = pyramid([draft, target], sampling=Sampling(temperature=1))

    def answer(seed: int) -> list[int]:
        chunks = generate(top, LETTERS, "a", 16, seed=seed)
        return [token for chunk in chunks for token in chunk.token_ids]

    answers = [answer(seed) for seed in range(5)]
    assert answers == [answer(seed) for seed in range(5)]
    assert len(set(map(tuple, answers))) == 5


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the cat?"}]


@pytest.fixture
def chatty() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_a_chat_is_the_text_its_template_writes(chatty: PreTrainedTokenizerFast) -> None:
    asked: list[list[int]] = []

    def law(context: list[int]) -> torch.Tensor:
        asked.append(context)
        return torch.full((len(chatty),), 1 / len(chatty))

    top = pyramid([TableModel(len(chatty), law)])
    list(generate(top, chatty, CHAT, 1))
    list(generate(top, chatty, "<system>be brief\n<user>the cat?\n<bot>", 1))
    assert asked[0] == asked[1]
    assert decoded(chatty, asked[0]) == "<system>be brief\n<user>the cat?\n<bot>"


# Refusals, before any work


def idle(vocab_size: int, max_context: int | None = None) -> TableModel:
    """A model that must not be asked."""

    def law(context: list[int]) -> list[float]:
        raise AssertionError("work was done")

    model = TableModel(vocab_size, law)
    model.max_context = max_context
    return model


@pytest.mark.parametrize(
    ("prompt", "arguments", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the chat holds no text"),
        ([{"role": "user", "content": ""}], {}, "the chat holds no text"),
        (PROMPT, {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (PROMPT, {"max_new_tokens": -1}, "max_new_tokens must be at least 1, got -1"),
        (PROMPT, {"stop": [""]}, "a stop string must not be empty"),
        (PROMPT, {"stop": ["x", ""]}, "a stop string must not be empty"),
        (CHAT, {}, "no chat template; give the prompt as one string"),
    ],
)
def test_bad_requests_are_refused_at_once(prompt: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate(pyramid([idle(400), idle(400)]), byte_level(), prompt, **arguments)


@pytest.mark.parametrize("bounds", [(12, None), (None, 12), (12, 99), (99, 12)])
@pytest.mark.parametrize(
    ("length", "max_new_tokens", "cure"),
    [(8, 5, "lower max_new_tokens to at most 4"), (12, 1, "shorten the prompt"), (13, 1, "shorten the prompt")],
)
def test_what_does_not_fit_the_smallest_context_is_refused_at_once(
    bounds: tuple[int | None, int | None], length: int, max_new_tokens: int, cure: str
) -> None:
    draft, target = (idle(400, bound) for bound in bounds)
    expected = f"{length} prompt tokens and {max_new_tokens} new ones are more than .* 12; {cure}"
    with pytest.raises(UsageError, match=expected):
        generate(pyramid([draft, target]), byte_level(), "z" * length, max_new_tokens)


def test_what_just_fits_is_answered() -> None:
    tokenizer, prompt = byte_level(), "z" * 8
    script = byte_script("mat.")[:4]
    levels = [scripted(script, 8, len(tokenizer)), scripted(script, 8, len(tokenizer))]
    for model in levels:
        model.max_context = 8 + len(script)
    answer = check_answer(list(generate(pyramid(levels), tokenizer, prompt, len(script))))
    assert answer == (decoded(tokenizer, script), script, "length")


def test_one_stop_string_needs_no_list() -> None:
    tokenizer = llama2()
    script = tokenizer.convert_tokens_to_ids(["▁the", "<0x0A>", "▁the"])
    streams = [generate(speaker(tokenizer, script), tokenizer, PROMPT, 3, stop=stop) for stop in ("\n", ["\n"])]
    assert [check_answer(list(chunks)) for chunks in streams] == [("the", script, "stop")] * 2
