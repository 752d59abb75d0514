"""`load_model` and `TransformersModel`: what loads, what is refused and with which words, and padded vocabularies."""

from __future__ import annotations

import builtins
import json
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    FalconH1Config,
    MambaConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    RepetitionPenaltyLogitsProcessor,
    T5Config,
    T5ForConditionalGeneration,
)

import tiny
from pyramidsd import PromptLookup, Rng, Sampling, pyramid
from pyramidsd.models.hf import TransformersModel, load_model
from pyramidsd.types import UsageError

load = partial(load_model, device="cpu")
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it comes from a hub; read only."""
    return save(tiny.causal_lm("llama", dtype=torch.float32), tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def save(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    tiny.word_tokenizer(tiny.VOCAB_SIZE).save_pretrained(path)
    return path


def refusal(*arguments: Any, **settings: Any) -> str:
    """What a user reads: one line."""
    with pytest.raises(UsageError) as caught:
        load(*arguments, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What loads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_a_folder_loads_in_the_dtype_asked_for(whole: Path, dtype: str) -> None:
    loaded = load(whole, dtype=dtype)
    original = tiny.causal_lm("llama", dtype=torch.float32).to(getattr(torch, dtype))
    assert loaded.model.dtype == getattr(torch, dtype)
    weights = loaded.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in original.state_dict().items())
    expected = tiny.fresh_rows(original, PROMPT).to(loaded.logits(PROMPT, 1).dtype)
    torch.testing.assert_close(loaded.logits(PROMPT, 5), expected[-5:], rtol=0, atol=0.2 if "16" in dtype else 1e-4)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("w5 w7")["input_ids"] == [5, 7]
    assert (loaded.vocab_size, loaded.max_context) == (tiny.VOCAB_SIZE, tiny.MAX_CONTEXT)


@pytest.mark.parametrize(("units", "expected"), [({"bf16": True}, torch.bfloat16), ({"bf16": False}, torch.float32)])
def test_auto_is_the_checkpoints_dtype_where_the_cpu_computes_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: dict[str, bool], expected: torch.dtype
) -> None:
    save(tiny.causal_lm("llama", dtype=torch.bfloat16), tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    assert load(tmp_path).model.dtype == expected


def test_stop_tokens_are_those_of_the_generation_config_the_config_and_the_tokenizer() -> None:
    model = tiny.causal_lm("llama", eos_token_id=7)
    model.generation_config.eos_token_id = [3, 4]
    tokenizer = tiny.word_tokenizer(tiny.VOCAB_SIZE)
    tokenizer.eos_token = "w9"
    assert TransformersModel(model).stop_tokens == {3, 4, 7}
    assert TransformersModel(model, tokenizer).stop_tokens == {3, 4, 7, 9}
    assert TransformersModel(tiny.causal_lm("llama")).stop_tokens == frozenset()


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Qwen2 with the letters as its tokens."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = tiny.causal_lm("qwen2", dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([chr(ord("!") + i) for i in range(94)] + ["ab"] + [f"<{i}>" for i in range(33)])
    writer.add_token_merges(["a b"])
    writer.add_token_types([gguf.TokenType.NORMAL] * tiny.VOCAB_SIZE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        stem, suffix = name.rsplit(".", 1)
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_loads_by_path_and_by_folder_and_name(gguf_file: Path) -> None:
    expected = tiny.fresh_rows(tiny.causal_lm("qwen2", dtype=torch.float32), PROMPT)[-4:]
    for loaded in (load(gguf_file, dtype="float32"), load(gguf_file.parent, "float32", gguf_file="model.gguf")):
        torch.testing.assert_close(loaded.logits(PROMPT, 4), expected, rtol=0, atol=1e-4)
        assert loaded.tokenizer is not None
        assert loaded.tokenizer("ab!")["input_ids"] == [94, 0]


# What is refused


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf", "deep/er/nowhere"])
def test_a_path_that_is_not_there(tmp_path: Path, name: str) -> None:
    assert "check the path" in refusal(tmp_path / name)


WHOLE = "check that it is a whole safetensors or GGUF model"


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "give the folder of a transformers model, or a GGUF file" in message


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert WHOLE in refusal(folder)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_safetensors(folder: Path, share: float) -> None:
    truncate(folder / "model.safetensors", share)
    assert WHOLE in refusal(folder)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.5, 0.999])
def test_truncated_gguf(gguf_file: Path, tmp_path: Path, share: float) -> None:
    path = Path(shutil.copy(gguf_file, tmp_path))
    truncate(path, share)
    assert WHOLE in refusal(path)


def truncate(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])


def test_a_missing_tensor_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 tensors, the first model.layers.1.mlp.up_proj.weight; fetch the model again" in refusal(folder)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickles_are_refused_unopened(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Bomb(tmp_path / "exploded"), file)
    assert "safetensors" in refusal(folder)
    assert not (tmp_path / "exploded").exists()


def test_code_that_comes_with_a_model_is_never_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the user, asked by transformers, says yes."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    imports = "from transformers import LlamaConfig as Config, LlamaForCausalLM as Model"
    (folder / "code.py").write_text(f"{imports}\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("dtype", ["float8", "int8", "", "fp16"])
def test_unknown_dtypes(whole: Path, dtype: str) -> None:
    assert "choose auto or one of float32, bfloat16, float16, float64" in refusal(whole, dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "", "meta", "cpu:first"])
def test_unknown_devices(whole: Path, device: str) -> None:
    assert "choose one of auto, cpu, cuda, mps" in refusal(whole, device=device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps"])
def test_devices_that_are_not_there(whole: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "use --device cpu or auto" in refusal(whole, device=device)
    assert load_model(whole, device="auto").model.device.type == "cpu"


_SIZES = {"vocab_size": tiny.VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_EXPERTS = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
UNSUPPORTED = {
    "recurrent": MambaConfig(vocab_size=tiny.VOCAB_SIZE, hidden_size=32, num_hidden_layers=1, state_size=4),
    "parallel hybrid": FalconH1Config(**_SIZES, **_HEADS, **_MAMBA),
    "alternating hybrid": Qwen3NextConfig(
        **_SIZES, **_HEADS, **_LINEAR, **_EXPERTS, layer_types=["linear_attention", "full_attention"]
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_state_that_cannot_be_rolled_back(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(UNSUPPORTED[kind])
    with pytest.raises(UsageError, match=r"cannot be rolled back .* use an attention-only model"):
        TransformersModel(model)
    assert "use an attention-only model" in refusal(save(model, tmp_path))


def test_encoder_decoder_models(tmp_path: Path) -> None:
    sizes = {"vocab_size": tiny.VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    with pytest.raises(UsageError, match="encoder-decoder model; use a decoder-only model"):
        TransformersModel(model)
    assert "decoder-only" in refusal(save(model, tmp_path))


def test_encoders(tmp_path: Path) -> None:
    """They attend to both sides and remember nothing, so they cannot continue a text."""
    model = AutoModelForCausalLM.from_config(BertConfig(**_SIZES, num_attention_heads=4))
    assert "decoder-only" in refusal(save(model, tmp_path))


# Padded vocabularies: one tokenizer of 120 words, models with more rows than that

NARROW, WIDE, WORDS = 128, 136, 120


def padded(vocab_size: int, seed: int) -> TransformersModel:
    return TransformersModel(tiny.causal_lm("llama", seed, vocab_size=vocab_size), tiny.word_tokenizer(WORDS))


PROCESSORS = {
    "bare": ((), {}),
    "penalty": ((RepetitionPenaltyLogitsProcessor(1.3),), {"repetition_penalty": 1.3}),
}


@pytest.mark.parametrize("sizes", [(NARROW, WIDE), (WIDE, NARROW), (NARROW, WIDE, WIDE), (WIDE, NARROW, WIDE)])
@pytest.mark.parametrize("kind", PROCESSORS)
def test_padded_vocabularies_mix_and_stay_exact(sizes: tuple[int, ...], kind: str) -> None:
    """Padding rows are random here, so their ids are really drafted and emitted."""
    processors, settings = PROCESSORS[kind]
    models = [padded(size, seed) for seed, size in enumerate(sizes, 3)]
    sampling = Sampling(temperature=0, processors=processors)
    top = pyramid(models, num_draft_tokens=[2, 4][: len(sizes) - 1], sampling=sampling)
    emitted: set[int] = set()
    for prompt in padded_prompts(sizes[-1]):
        expected = tiny.plain(models[-1].model, prompt, 20, **settings)
        assert top.draft(prompt, 20, Rng()).tokens == expected
        emitted.update(expected)
    assert max(emitted) >= (NARROW if sizes[-1] == WIDE else WORDS)


def padded_prompts(vocab_size: int) -> list[list[int]]:
    """The last token was followed by a padding id before."""
    return [[5, vocab_size - 3, *prompt, 5] for prompt in tiny.prompts(3, vocab_size=vocab_size)]


def test_prompt_lookup_below_a_narrower_model_stays_exact() -> None:
    """It proposes ids the qualifier has no row for."""
    qualifier, target = padded(NARROW, seed=0), padded(WIDE, seed=1)
    top = pyramid([PromptLookup(), qualifier, target], num_draft_tokens=[3, 4], sampling=Sampling(temperature=0))
    for prompt in padded_prompts(WIDE):
        assert top.draft(prompt, 20, Rng()).tokens == tiny.plain(target.model, prompt, 20)


def test_drafts_of_a_padded_relative_are_accepted() -> None:
    """The same model under a wider head agrees on every word, so all its drafts are kept."""
    target = padded(NARROW, seed=0)
    wider = tiny.causal_lm("llama", vocab_size=WIDE)
    weights = target.model.state_dict()
    rows = {name for name, weight in weights.items() if len(weight) == NARROW}
    pads = wider.state_dict()
    wider.load_state_dict(
        {
            name: torch.cat([w, torch.zeros_like(pads[name][NARROW:])]) if name in rows else w
            for name, w in weights.items()
        }
    )
    top = pyramid([TransformersModel(wider, target.tokenizer), target], sampling=Sampling(temperature=0))
    stats = top.draft([1, 2, 3], 40, Rng()).stats[1]
    assert stats.accepted == stats.proposed > 0


def test_different_tokenizers_are_refused_at_the_first_differing_id() -> None:
    target = padded(NARROW, seed=0)
    words = tiny.word_tokenizer(WORDS)
    words.add_tokens(["other"])  # id 120, which the target's tokenizer does not have
    assert pyramid([TransformersModel(target.model, words), target]).model is target
    foreign = tiny.word_tokenizer(WORDS, prefix="v")
    with pytest.raises(UsageError, match="id 0 is 'v0' in one and 'w0' in the target; use models of one family"):
        pyramid([TransformersModel(target.model, foreign), target])
    target.tokenizer.add_tokens(["another"])
    with pytest.raises(UsageError, match="id 120 is 'other' in one and 'another' in the target"):
        pyramid([TransformersModel(target.model, words), target])


def test_sizes_that_differ_need_tokenizers_to_compare() -> None:
    narrow, wide = tiny.causal_lm("llama"), tiny.causal_lm("llama", vocab_size=WIDE)
    tokenizer = tiny.word_tokenizer(WORDS)
    for first, second in ((None, None), (tokenizer, None), (None, tokenizer)):
        with pytest.raises(UsageError, match=r"128 tokens and the target 136; give both their tokenizer"):
            pyramid([TransformersModel(narrow, first), TransformersModel(wide, second)])
