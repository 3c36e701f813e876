"""Which decoder architectures are calibrated, and which are refused and why.

This list is what `fp8calib models` prints and what the tests go through. A model that is not on it
is not refused for that: `attention.probe` looks at every model's layers before they are observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fp8calib.checkpoint.config import architecture, text_config
from fp8calib.errors import ModelError

_OWN_ATTENTION = (
    "its attention layers do not call transformers' attention function, so their K and V cannot "
    "be observed"
)
_LATENT = (
    "multi-head latent attention: the cache holds a latent vector and a RoPE key that all heads "
    "share, so there are no K and V per head to scale"
)


@dataclass(frozen=True)
class Architecture:
    """One `model_type` of config.json. `refused` is the reason why it cannot be calibrated, empty
    when it can, with both strategies; `note` says what is particular about its layers."""

    model_type: str
    title: str
    note: str = ""
    refused: str = ""


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", "Llama 1-3, SmolLM, Yi, TinyLlama"),
    Architecture("llama4_text", "Llama 4", "chunked attention"),
    Architecture("mistral", "Mistral", "sliding windows"),
    Architecture("mixtral", "Mixtral", "mixture of experts"),
    Architecture("qwen2", "Qwen2, Qwen2.5", "K bias: often a large range"),
    Architecture("qwen2_moe", "Qwen2-MoE", "K bias, mixture of experts"),
    Architecture("qwen3", "Qwen3", "q/k norm"),
    Architecture("qwen3_moe", "Qwen3-MoE", "q/k norm, mixture of experts"),
    Architecture("qwen3_next", "Qwen3-Next", "full-attention layers; linear ones have no cache"),
    Architecture("gemma", "Gemma"),
    Architecture("gemma2", "Gemma 2", "softcap, sliding windows"),
    Architecture("gemma3_text", "Gemma 3", "q/k norm, sliding windows"),
    Architecture("gemma3n_text", "Gemma 3n", "layers that share K and V get their source's scales"),
    Architecture("gemma4_text", "Gemma 4", "head size by layer, shared K and V"),
    Architecture("phi", "Phi-1, Phi-2", "partial RoPE"),
    Architecture("phi3", "Phi-3, Phi-4", "fused QKV projection"),
    Architecture("olmo2", "OLMo 2", "q/k norm"),
    Architecture("olmo3", "OLMo 3", "q/k norm, sliding windows"),
    Architecture("cohere", "Command R"),
    Architecture("cohere2", "Command R7B, Command A", "sliding windows; no RoPE in full layers"),
    Architecture("granite", "Granite 3"),
    Architecture("glm4", "GLM-4", "partial RoPE"),
    Architecture("glm4_moe", "GLM-4.5", "partial RoPE, mixture of experts"),
    Architecture("smollm3", "SmolLM3", "no RoPE in some layers"),
    Architecture("stablelm", "StableLM 2", "partial RoPE"),
    Architecture("starcoder2", "StarCoder2", "sliding windows"),
    Architecture("gpt_oss", "gpt-oss", "attention sinks, sliding windows, mixture of experts"),
    Architecture("gpt2", "GPT-2", "fused QKV projection"),
    Architecture("gpt_bigcode", "StarCoder", "one KV head"),
    Architecture("gpt_neox", "GPT-NeoX, Pythia", "fused QKV projection, partial RoPE"),
    Architecture("opt", "OPT"),
    Architecture("qwen2_vl", "Qwen2-VL", "its language model; images are not needed"),
    Architecture("llava", "LLaVA", "its language model; images are not needed"),
    Architecture("gemma3", "Gemma 3 with vision", "its language model; images are not needed"),
    Architecture("deepseek_v2", "DeepSeek-V2", refused=_LATENT),
    Architecture("deepseek_v3", "DeepSeek-V3, R1, Kimi K2", refused=_LATENT),
    Architecture("minicpm3", "MiniCPM3", refused=_LATENT),
    Architecture("bloom", "BLOOM", refused=_OWN_ATTENTION),
    Architecture("codegen", "CodeGen", refused=_OWN_ATTENTION),
    Architecture("falcon", "Falcon", refused=_OWN_ATTENTION),
    Architecture("gptj", "GPT-J", refused=_OWN_ATTENTION),
    Architecture("mpt", "MPT", refused=_OWN_ATTENTION),
    Architecture("doge", "Doge", refused="its attention layers make masks of their own"),
    Architecture("mamba", "Mamba", refused="it has no attention layers, so no KV cache"),
)


def check_architecture(config: dict[str, Any]) -> None:
    """Refuse what config.json (its content in `config`) alone shows cannot be calibrated.

    Raises:
        ModelError: names the model type and the reason.
    """
    text = text_config(config)
    reasons = {entry.model_type: entry.refused for entry in ARCHITECTURES}
    reason = reasons.get(text.get("model_type", ""), "")
    if text.get("kv_lora_rank"):
        reason = _LATENT
    if config.get("is_encoder_decoder"):
        reason = "it is an encoder-decoder model; FP8 KV-cache scales are for decoders"
    if reason:
        raise ModelError(f"{architecture(config)} cannot be calibrated: {reason}")
