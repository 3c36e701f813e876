"""What a model's generation_config.json says of sampling."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_sampling(model: PreTrainedModel) -> dict[str, Any]:
    """Fields of SamplingParams that the model comes with; they hold where a user is silent, as in
    vLLM. A config that does not sample says nothing of temperature and the like."""
    said = model.generation_config
    values = {} if said is None else said.to_diff_dict()
    names = _NAMES if values.get("do_sample") else ("repetition_penalty",)
    return {name: values[name] for name in names if values.get(name) is not None}
