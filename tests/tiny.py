"""Tiny random transformers models: real architectures, nothing downloaded, the same weights for the same seed."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

VOCAB_SIZE = 128
MAX_CONTEXT = 96
NUM_LAYERS = 3
WINDOW = 8  # of sliding layers
LONG_ROPE = 24  # Phi-3 changes its rotation past this many tokens

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": MAX_CONTEXT,
}
_GEMMA = _SIZES | {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _FULL, _SLIDING],
    "tie_word_embeddings": False,  # tied random ones repeat the last token for ever
}
_LONG_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _SIZES),
    "qwen2": (Qwen2Config, _SIZES),
    "qwen2-sliding": (
        Qwen2Config,
        _SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": [_FULL, _SLIDING, _SLIDING]},
    ),
    "mistral-sliding": (MistralConfig, _SIZES | {"sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, _GEMMA),
    "gemma3": (Gemma3TextConfig, _GEMMA),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_head": 4, "n_layer": NUM_LAYERS, "n_positions": MAX_CONTEXT}),
    "phi3-longrope": (
        Phi3Config,
        _SIZES | {"original_max_position_embeddings": LONG_ROPE, "rope_parameters": _LONG_ROPE},
    ),
}


def config(family: str, **changes: Any) -> PreTrainedConfig:
    """No special tokens, so that nothing stops by accident, and weights large enough that the context matters."""
    kind, sizes = FAMILIES[family]
    common = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3}
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return kind(**(common | sizes | no_tokens | changes))


def causal_lm(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(family, **changes))
    return model.to(dtype).eval()


def relative(model: PreTrainedModel, noise: float, seed: int = 0) -> PreTrainedModel:
    """A copy with disturbed weights: a draft that is often, not always, right."""
    twin = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in twin.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)
    return twin


@torch.no_grad()
def fresh_rows(model: PreTrainedModel, context: list[int]) -> torch.Tensor:
    """The oracle of every cache: one forward of the whole context without one. Rows [len(context), V]."""
    return model(input_ids=torch.tensor([context]), use_cache=False).logits[0]


def plain(model: PreTrainedModel, prompt: list[int], max_new_tokens: int, **settings: Any) -> list[int]:
    """The oracle of every greedy answer: the new tokens of transformers' own `generate`."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **settings
    )
    return answer[0, len(prompt) :].tolist()


def prompts(count: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Random prompts of 1 to 20 tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(draw.randint(1, 20))] for _ in range(count)]


def word_tokenizer(num_words: int, prefix: str = "w") -> PreTrainedTokenizerFast:
    """Words `w0`, `w1`, ... are the ids 0, 1, ...; no special tokens but the unknown word 0."""
    backend = Tokenizer(WordLevel({f"{prefix}{i}": i for i in range(num_words)}, unk_token=f"{prefix}0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=f"{prefix}0")
