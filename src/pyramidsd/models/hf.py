"""`TransformersModel` and `load_model`: the only file that touches a transformers model or cache."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from functools import partialmethod
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from pyramidsd.models.base import CachedModel
from pyramidsd.types import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
DEVICES = ("auto", "cpu", "cuda", "mps")


class TransformersModel(CachedModel):
    """A decoder-only transformers causal LM as a `Model`. Its weights and its config are left as they are; it is put
    into evaluation mode.

    The cache keeps every key and value also for sliding-window layers, whose window is then made by the mask:
    any number of tokens can be taken back.

    Args:
        model: a loaded model; attention implementation, dtype and device are its own.
        tokenizer: lets pyramids check that all levels share one vocabulary, and text be generated.

    Raises:
        UsageError: an encoder-decoder model, or one whose state cannot be rolled back.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        super().__init__()
        _refuse_unsupported(model)
        self.model = model.eval()
        self.tokenizer = tokenizer
        config = model.config.get_text_config(decoder=True)
        self.vocab_size = config.vocab_size
        self.max_context = getattr(config, "max_position_embeddings", None)
        self.stop_tokens = frozenset(_stop_tokens(model, tokenizer))
        self._turning_point = _turning_point(config)
        accepted = inspect.signature(model.forward).parameters
        self._cache_keyword = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5.24
        self._can_limit_rows = "logits_to_keep" in accepted
        self._reset()
        self._refuse_unless_it_remembers()

    def vocabulary(self) -> Mapping[int, str] | None:
        """The token of every id, where a tokenizer was given."""
        if self.tokenizer is None:
            return None
        return {token_id: token for token, token_id in self.tokenizer.get_vocab().items()}

    def logits(self, context: list[int], n: int) -> Tensor:
        """As `CachedModel.logits`. Where a long context turns all keys by other angles (LongRoPE), prefixes on both
        sides of the turning point are asked for apart, and nothing cached is carried over it."""
        short = min(max(self._turning_point - (len(context) - n), 0), n)
        if 0 < short < n:
            return torch.cat([self.logits(context[: self._turning_point], short), self.logits(context, n - short)])
        if (len(self._seen) > self._turning_point) != (len(context) > self._turning_point):
            self.forget()
        return super().logits(context, n)

    def _refuse_unless_it_remembers(self) -> None:
        """Two tokens in, one taken back: a model that keeps no cache would answer as if new tokens were all."""
        self._forward([0, 0], 1)
        self._cache.crop(-1)
        if self._cache.get_seq_length() != 1:
            raise UsageError(f"{type(self.model).__name__} keeps no cache of its context; use a decoder-only model")
        self._reset()

    @torch.inference_mode()
    def _forward(self, tokens: list[int], n: int) -> Tensor:
        arguments: dict[str, Any] = {self._cache_keyword: self._cache}
        if self._can_limit_rows:
            arguments["logits_to_keep"] = n  # a long prompt never makes a prompt x vocabulary matrix
        ids = torch.tensor([tokens], device=self.model.device)
        rows: Tensor = self.model(input_ids=ids, use_cache=True, **arguments).logits[0]
        return rows[-n:]

    def _rollback(self, n: int) -> None:
        if n == len(self._seen):
            self._reset()
        else:
            self._cache.crop(-n)  # a negative count means "remove" in every supported version

    def _reset(self) -> None:
        self._cache = DynamicCache()


def _refuse_unsupported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UsageError(f"{name} is an encoder-decoder model; use a decoder-only model")
    if not getattr(model.config, "is_decoder", True):  # only encoders that can be made decoders have the switch
        raise UsageError(f"{name} attends to both sides of a token; use a decoder-only model")
    layers = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or []
    recurrent = sorted({kind for kind in layers if kind not in _ATTENTION_LAYERS})
    if recurrent or getattr(model, "_is_stateful", False):
        what = f"layers of kind {', '.join(recurrent)}" if recurrent else "recurrent state"
        raise UsageError(
            f"{name} has {what}, which cannot be rolled back after a rejection; use an attention-only model"
        )


_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> set[int]:
    """End-of-text ids of the generation config, the config and the tokenizer."""
    found = [
        getattr(model.generation_config, "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    ]
    return {token for ids in found if ids is not None for token in (ids if isinstance(ids, list) else [ids])}


def _turning_point(config: Any) -> int:
    """The longest context under a LongRoPE model's short angles."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_kind = [value for value in parameters.values() if isinstance(value, dict)]
    turns = [
        rope["original_max_position_embeddings"]
        for rope in per_layer_kind or [parameters]
        if rope.get("rope_type") == "longrope"
    ]
    return min(turns, default=sys.maxsize)


def load_model(
    name_or_path: str | Path,
    dtype: str = "auto",
    device: str = "auto",
    gguf_file: str | None = None,
) -> TransformersModel:
    """Load a model and its tokenizer. Weights are read from safetensors or GGUF, never from pickles, and no code
    that comes with a model is run.

    Args:
        name_or_path: a folder, a GGUF file, or the name of a model on the hub, which is downloaded if it is not there.
        dtype: float32, bfloat16, float16, float64, or auto: the checkpoint's own, but float32 on a CPU without
            bfloat16 arithmetic, where half precision makes a window cost as many passes as it has tokens.
        device: cpu, cuda, cuda:N, mps, or auto: the first accelerator there is.
        gguf_file: the file inside the folder or hub repository `name_or_path`.

    Raises:
        UsageError: nothing usable is there, or the device or dtype is not available.
    """
    place = resolve_device(device)
    wanted = resolve_dtype(dtype, place)
    name, gguf = _located(str(name_or_path), gguf_file)
    try:
        model, tokenizer, missing = _read(name, wanted, {"gguf_file": gguf} if gguf else {})
    except UsageError:
        raise
    except Exception as error:  # whatever a damaged or foreign file makes the readers raise is the user's answer
        reason = str(error).strip().splitlines()
        raise UsageError(
            f"cannot load {name_or_path}: {reason[0] if reason else type(error).__name__}; "
            "check that it is a whole safetensors or GGUF model"
        ) from error
    if missing:
        raise UsageError(f"{name_or_path} lacks {len(missing)} tensors, the first {missing[0]}; fetch the model again")
    return TransformersModel(model.to(place), tokenizer)


def _located(name: str, gguf_file: str | None) -> tuple[str, str | None]:
    """The folder or hub name, and the GGUF file inside it."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and gguf_file is None:
        if not path.is_file():
            raise UsageError(f"there is no file {path}; check the path")
        return str(path.parent), path.name
    if not name:
        raise UsageError("the name of a model is empty; give a folder, a GGUF file, or a name on the hub")
    if path.is_file():
        raise UsageError(f"{path} is a file, but not GGUF; give the folder of a model, or a .gguf file")
    if path.is_dir():
        if gguf_file is None and not (path / "config.json").is_file():
            raise UsageError(f"{path} holds no config.json; give the folder of a transformers model, or a GGUF file")
        return str(path), gguf_file
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:  # on the hub: model or owner/model
        raise UsageError(f"there is no folder {path}; check the path, or give the name of a model on the hub")
    return name, gguf_file


def _read(
    name: str, dtype: torch.dtype | str, source: dict[str, str]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """Model, tokenizer and the names of missing tensors; neither pickles nor foreign code are read."""
    config = AutoConfig.from_pretrained(name, trust_remote_code=False, **source)
    if config.is_encoder_decoder:
        raise UsageError(f"{name} is an encoder-decoder model; use a decoder-only model")
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **source)
    weights = {"quantization_config": GgufConfig(dequantize=True)} if source else {"use_safetensors": True}
    model, info = AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, output_loading_info=True, trust_remote_code=False, **source, **weights
    )
    return model, tokenizer, sorted(info["missing_keys"])


def quiet() -> None:
    """No progress bars and no advice from transformers, for programs that show their own."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    getLogger("huggingface_hub").setLevel(ERROR)
    tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)  # the GGUF reader's bar has no other switch


def resolve_device(device: str) -> torch.device:
    """`auto` is the first of cuda, mps and cpu that is there.

    Raises:
        UsageError: the device is unknown or not available.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return torch.device(next(kind for kind, usable in available.items() if usable))
    kind, _, index = device.partition(":")
    if kind not in available or not (index or "0").isdigit():
        raise UsageError(f"unknown device {device!r}; choose one of {', '.join(DEVICES)}, or a numbered one as cuda:1")
    if not available[kind]:
        raise UsageError(f"no {kind} device is available to this build of torch; use --device cpu or auto")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """What to ask transformers for; `auto` is explained at `load_model`.

    Raises:
        UsageError: the dtype is unknown.
    """
    if dtype == "auto":
        # Older versions of torch cannot tell; there the checkpoint decides.
        asked = getattr(torch.cpu, "get_capabilities", None) if device.type == "cpu" else None
        capabilities: dict[str, bool] = asked() if asked else {}
        return torch.float32 if capabilities and not any(map(capabilities.get, _BFLOAT16_UNITS)) else "auto"
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; choose auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


_BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "bf16")


def first_layers(whole: TransformersModel, num_layers: int) -> TransformersModel:
    """The first layers of a model under its own final norm and head, sharing its weights: a drafter that needs no
    training and no memory, and agrees with the whole only if most layers are kept (LayerSkip, arXiv 2404.16710).

    Raises:
        UsageError: `num_layers` is not from 1 to the number of layers.
    """
    config = copy.deepcopy(whole.model.config)
    text_config = config.get_text_config(decoder=True)
    total = text_config.num_hidden_layers
    if not 1 <= num_layers <= total:
        raise UsageError(f"the target has {total} layers; keep from 1 to {total} of them, got {num_layers}")
    text_config.num_hidden_layers = num_layers
    model = _shallow_copy(whole.model)
    model.config = config
    base = _shallow_copy(whole.model.base_model)
    base.config = text_config
    for name, child in base.named_children():
        if isinstance(child, torch.nn.ModuleList) and len(child) == total:
            base._modules[name] = child[:num_layers]
    model._modules[model.base_model_prefix] = base
    return TransformersModel(model, whole.tokenizer)


def _shallow_copy(module: Any) -> Any:
    """Another module over the same submodules and parameters, with tables of its own."""
    twin = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict):  # submodules, parameters, buffers, hooks
            setattr(twin, name, value.copy())
    return twin
