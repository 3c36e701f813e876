"""The one place where we meet a model's attention: transformers' attention-function hook.

Under the implementation named ATTENTION, every attention layer of a Hugging Face decoder hands its
post-RoPE q, k and v to a *handler* of ours, which sees the layer (`module`), the values and the
mask, and returns the attention output. Calibration observes there; `probe` finds out there what
each layer is. The mask function is registered too: without it transformers builds no mask at all,
silently, and padding leaks into the maxima.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from fp8calib.errors import ModelError
from fp8calib.layers import LayerSpec

ATTENTION = "fp8calib"

Handler = Callable[..., torch.Tensor]
_handler: ContextVar[Handler | None] = ContextVar("fp8calib_attention_handler", default=None)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    handler = _handler.get()
    if handler is None:
        raise RuntimeError("attention called outside fp8calib.attention.handle_attention")
    return handler(module, query, key, value, attention_mask, **kwargs), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attention_configs(model: torch.nn.Module) -> list[PretrainedConfig]:
    """Every configuration object from which some layer of `model` reads its implementation."""
    configs = {
        id(config): config
        for module in model.modules()
        if isinstance(config := getattr(module, "config", None), PretrainedConfig)
    }
    return list(configs.values())


@contextmanager
def use_attention(model: torch.nn.Module, implementation: str) -> Iterator[None]:
    """Run `model` in eval mode under the named attention implementation; restore both after."""
    before = [(config, config._attn_implementation) for config in attention_configs(model)]
    training = model.training
    try:
        for config, _ in before:
            config._attn_implementation_internal = implementation
        model.eval()
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name
        model.train(training)


@contextmanager
def handle_attention(model: torch.nn.Module, handler: Handler) -> Iterator[None]:
    """Route every attention layer of `model` through `handler` for the length of the block.

    The handler gets ``(module, query, key, value, attention_mask, **kwargs)`` with query
    [B, Hq, T, D], key [B, Hkv, T, D], value [B, Hkv, T, Dv], and returns [B, T, Hq, Dv].
    """
    token = _handler.set(handler)
    try:
        with use_attention(model, ATTENTION):
            yield
    finally:
        _handler.reset(token)


def plain_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> torch.Tensor:
    """What the model's own attention computes: SDPA, or by hand where SDPA cannot express it.

    Args:
        query, key, value: [B, Hq, T, D], [B, Hkv, S, D], [B, Hkv, S, Dv].
        attention_mask: boolean [B, 1, T, S] (True may attend), or None for plain causal.
        softcap: ``softcap * tanh(logits / softcap)`` (Gemma-2).
        s_aux: learned sink logits [Hq], one more column of the softmax (gpt-oss).
    Returns:
        [B, T, Hq, Dv] in query's dtype.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = attention_mask is None and is_causal and query.shape[2] > 1
    grouped = query.shape[1] != key.shape[1]
    if softcap is None and s_aux is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=grouped,
        )
        return out.transpose(1, 2).contiguous()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = (query @ key.transpose(2, 3)).float() * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if attention_mask is not None:
        logits = logits.masked_fill(~attention_mask, torch.finfo(torch.float32).min)
    elif causal:
        below = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~below, torch.finfo(torch.float32).min)
    if s_aux is not None:
        sinks = s_aux.float().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        probabilities = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = logits.softmax(-1)
    return (probabilities.to(query.dtype) @ value).transpose(1, 2).contiguous()


@torch.no_grad()
def probe(model: PreTrainedModel) -> list[LayerSpec]:
    """Find every attention layer that reads a KV cache, by one forward pass over two tokens.

    Raises:
        ModelError: a layer keeps a KV cache but never reaches the attention-function hook, is not
            causal, or is otherwise something whose values we would misread; layers are named.
    """
    names = {id(module): name for name, module in model.named_modules()}
    specs: dict[int, LayerSpec] = {}
    keys: dict[int, torch.Tensor] = {}

    def record(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        name, index = names[id(module)], getattr(module, "layer_idx", None)
        problem = _unreadable(index, module, specs, attention_mask, kwargs)
        problem = problem or _computes_differently(module, query, key, value, kwargs)
        if problem:
            raise ModelError(
                f"attention layer {name} ({type(module).__name__}) {problem}: not supported"
            )
        assert index is not None
        specs[index] = LayerSpec(
            index=index,
            name=name,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            v_head_dim=value.shape[3],
            sliding_window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux") is not None,
            scaling=kwargs.get("scaling"),
        )
        keys[index] = key
        return plain_attention(module, query, key, value, attention_mask, **kwargs)

    owners = _cache_owners(_two_tokens(model, record), model)
    if unseen := sorted(owners - specs.keys()):
        raise ModelError(
            f"{type(model).__name__}: attention layers {_named(unseen, model)} keep a KV cache but "
            "do not call transformers' attention function, so their K and V cannot be observed; "
            "this architecture is not supported"
        )
    if not specs:
        raise ModelError(f"{type(model).__name__} has no attention layer with a KV cache")
    for index, spec in specs.items():
        if index not in owners:
            source = _shared_with(index, keys, owners)
            specs[index] = LayerSpec(**{**vars(spec), "kv_source": source})
    return [specs[index] for index in sorted(specs)]


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The part of `model` that ends before the language-model head."""
    decoder = getattr(model, model.base_model_prefix, None)
    return decoder if isinstance(decoder, torch.nn.Module) else model.get_decoder()


def _two_tokens(model: PreTrainedModel, handler: Handler) -> Any:
    """The cache that a forward pass over two tokens leaves behind."""
    name = type(model).__name__
    tokens = torch.tensor([[1, 2]], device=model.device)
    with handle_attention(model, handler):
        try:
            output = decoder_of(model)(input_ids=tokens, use_cache=True)
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as problem:
            first = " ".join(str(problem).split())[:200]
            raise ModelError(f"{name}: a forward pass over two tokens fails: {first}") from problem
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        raise ModelError(f"{name} has no attention layer with a KV cache")
    return cache


def _unreadable(
    index: int | None,
    module: torch.nn.Module,
    seen: dict[int, LayerSpec],
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> str | None:
    """Why this layer's values would be misread, or None."""
    if attention_mask is not None and attention_mask.is_floating_point():
        return "makes an attention mask of its own"  # those that we register are boolean
    if index is None:
        return "does not know its layer index"
    if index in seen:
        return f"shares layer index {index} with {seen[index].name}"
    if not getattr(module, "is_causal", True):
        return "is not causal"
    if kwargs.get("position_bias") is not None:
        return "adds a position bias to its logits"
    return None


def _computes_differently(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
) -> str | None:
    """Compare `plain_attention` with the eager function of the model's own code, on random values
    of the layer's shapes: what a layer adds there would be missing from all layers after it."""
    eager = getattr(type(module).forward, "__globals__", {}).get("eager_attention_forward")
    if eager is None:
        return None
    generator = torch.Generator().manual_seed(0)

    def like(x: torch.Tensor) -> torch.Tensor:
        shape = (1, x.shape[1], 8, x.shape[3])
        return 4 * torch.randn(shape, generator=generator).to(x.device)

    q, k, v = like(query), like(key), like(value)
    may = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=q.device).tril()
    added = torch.zeros(may.shape, device=q.device).masked_fill(~may, torch.finfo(q.dtype).min)
    ours = plain_attention(module, q, k, v, may, **kwargs)
    own = eager(module, q, k, v, added, **kwargs)[0]
    if torch.allclose(ours, own.reshape(ours.shape).float(), rtol=5e-3, atol=5e-3):
        return None
    return "computes something else than softmax attention over its K and V"


def _cache_owners(cache: Any, model: PreTrainedModel) -> set[int]:
    layers = getattr(cache, "layers", None)
    if layers is None:
        return set(range(model.config.get_text_config(decoder=True).num_hidden_layers))
    return {
        index
        for index, layer in enumerate(layers)
        if isinstance(stored := getattr(layer, "keys", None), torch.Tensor) and stored.numel()
    }


def _named(indices: list[int], model: PreTrainedModel) -> str:
    names = {
        module.layer_idx: f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if "attention" in type(module).__name__.lower() and hasattr(module, "layer_idx")
    }
    return ", ".join(names.get(index, str(index)) for index in indices)


def _shared_with(index: int, keys: dict[int, torch.Tensor], owners: set[int]) -> int:
    for source in sorted(owners & keys.keys(), reverse=True):
        if keys[source].shape == keys[index].shape and torch.equal(keys[source], keys[index]):
            return source
    raise ModelError(
        f"attention layer {index} neither keeps a KV cache nor re-uses that of another layer"
    )
