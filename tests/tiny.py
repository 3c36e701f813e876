"""Tiny random-weight checkpoints of many architectures, with a byte-level tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")  # ids 0, 1, 2

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

# What an architecture needs on top of _SHAPE, by model_type.
_MORE: dict[str, dict[str, Any]] = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "cohere2": {"sliding_window": 6},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "falcon": {"alibi": False},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 6,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 256},
    "gpt_oss": {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4},
    "llama4_text": {
        "head_dim": 16,
        "attention_chunk_size": 6,
        "num_local_experts": 2,
        "intermediate_size_mlp": 96,
    },
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi3": {"sliding_window": 6},
    "qwen2_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


# Composite models: the rest of their configuration, beside a `text_config` of the given type.
_COMPOSITE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        {"vision_config": _VISION, "image_token_index": 300, "boi_token_index": 301},
    ),
    "llava": (
        "llama",
        {
            "vision_config": {"model_type": "clip_vision_model", **_VISION},
            "image_token_index": 300,
        },
    ),
    "qwen2_vl": (
        "qwen2_vl_text",
        {
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
            "image_token_id": 300,
            "video_token_id": 301,
            "vision_start_token_id": 302,
            "vision_end_token_id": 303,
        },
    ),
}


def text_config(model_type: str, **config: Any) -> dict[str, Any]:
    """Settings of a tiny language model's configuration; `config` overrides."""
    return {**_SHAPE, **_MORE.get(model_type, {}), **config}


def write_tokenizer(
    folder: Path,
    *,
    add_bos: bool = False,
    pad: bool = True,
    chat_template: str | None = CHAT_TEMPLATE,
) -> None:
    """One token a byte, after the three special ones; `add_bos` puts `<s>` in front of a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": 256,
        **({"pad_token": "<pad>"} if pad else {}),
        **({"chat_template": chat_template} if chat_template else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_model(
    folder: Path,
    model_type: str = "llama",
    *,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "1GB",
    tokenizer: dict[str, Any] | None = None,
    edit: Callable[[Any], None] | None = None,
    **config: Any,
) -> Path:
    """Write a random-weight checkpoint of `model_type` and its tokenizer; return `folder`.

    `config` overrides fields of the configuration, `tokenizer` is handed to `write_tokenizer`, and
    `edit` changes the model in place before it is saved.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = text_config(model_type, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings))
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, **(tokenizer or {}))
    return folder


def write_composite(folder: Path, model_type: str, *, seed: int = 0) -> Path:
    """Write a random-weight vision-language model of `model_type` and its tokenizer."""
    import torch
    from transformers import AutoModelForMultimodalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text, rest = _COMPOSITE[model_type]
    config = CONFIG_MAPPING[model_type](
        text_config={"model_type": text, **text_config(text)}, **rest
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForMultimodalLM.from_config(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder
