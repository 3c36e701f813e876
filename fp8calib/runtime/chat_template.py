"""From a conversation to a prompt, by the tokenizer's chat template in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from fp8calib.errors import UserError
from fp8calib.runtime.tokenize import tokenize

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, list[int]]:
    """The text and the token ids of a conversation.

    Args:
        messages: each with a `role` and what the template reads of it, mostly `content`.
        tools: JSON schemas of functions that the model may call.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open, for the model to go on with.
        variables: more names that the template may read.

    Raises:
        UserError: there is no template, it refuses the conversation, a variable has the name of an
            option of transformers, or a text is no Unicode.
    """
    if not tokenizer.chat_template:
        raise UserError("this model's tokenizer has no chat template; use plain prompts")
    variables = dict(variables or {})
    if taken := sorted(variables.keys() & _OPTIONS):
        raise UserError(f"{', '.join(taken)}: not a variable of a chat template")
    try:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **variables,
        )
    except _REFUSALS as problem:
        raise UserError(f"the chat template refuses the conversation: {problem}") from problem
    # The template has written every special token there is to be.
    return text, tokenize(tokenizer, text, add_special_tokens=False)


# A template is code over values that a client chose: these are what it can run into.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# Parameters of apply_chat_template that a request has no business with.
_OPTIONS = {
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "tokenizer_class",
    "processor_kwargs",
}
