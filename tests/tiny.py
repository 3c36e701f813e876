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

# What an architecture needs on top of _SHAPE, by model_type.
_MORE: dict[str, dict[str, Any]] = {
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
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {"head_dim": 16, "sliding_window": 6, "num_local_experts": 4},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
}


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

    settings = {**_SHAPE, **_MORE.get(model_type, {}), **config}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**settings))
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, **(tokenizer or {}))
    return folder
