"""Tiny random transformers models: real architectures, nothing downloaded, the same weights for the same seed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

VOCAB_SIZE = 128
MAX_CONTEXT = 96
NUM_LAYERS = 3
WINDOW = 8  # of sliding layers

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": MAX_CONTEXT,
}
_GPT2_SIZES = {"n_embd": 32, "n_head": 4, "n_layer": NUM_LAYERS, "n_positions": MAX_CONTEXT}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, _SIZES),
    "qwen2": (Qwen2Config, _SIZES),
    "qwen2-sliding": (
        Qwen2Config,
        _SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": [_FULL, _SLIDING, _SLIDING]},
    ),
    "mistral-sliding": (MistralConfig, _SIZES | {"sliding_window": WINDOW}),
    "gemma2": (Gemma2Config, _SIZES | {"sliding_window": WINDOW, "layer_types": [_SLIDING, _FULL, _SLIDING]}),
    "gemma3": (Gemma3TextConfig, _SIZES | {"sliding_window": WINDOW, "layer_types": [_SLIDING, _FULL, _SLIDING]}),
    "gpt2": (GPT2Config, _GPT2_SIZES),
}


def config(family: str, **changes: Any) -> PreTrainedConfig:
    """No special tokens, so that nothing stops by accident, and weights large enough that the context matters."""
    kind, sizes = FAMILIES[family]
    plain = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.2}
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return kind(**(plain | sizes | no_tokens | changes))


def causal_lm(family: str, seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(family, **changes))
    return model.to(dtype).eval()
