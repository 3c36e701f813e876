"""The paged cache as a model of lm-evaluation-harness, which knows it as `fp8calib`.

`verify --tasks` uses it; so can everything that takes a model of the harness:

>>> import fp8calib.evaluation.lm_eval_model
>>> lm_eval.simple_evaluate("fp8calib", "pretrained=FOLDER,kv_cache_dtype=fp8", tasks=[...])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fp8calib import console
from fp8calib.evaluation.engines import make_engine
from fp8calib.evaluation.variants import Run, Variant
from fp8calib.runtime.kv_cache_dtype import choose_kv_format
from fp8calib.runtime.loader import load
from fp8calib.runtime.sampling_params import SamplingParams

_MAX_GEN_TOKENS = 256  # where a task does not say
_NUM_SEQS = 16
_CPU_TOKENS, _GPU_TOKENS = 256, 4096  # in a pass


@register_model("fp8calib")
class Fp8CalibLM(TemplateLM):
    """A model with a paged KV cache.

    Args:
        pretrained: a folder, a Hub id, or ``demo:smollm2-135m-instruct``.
        run: in place of it, a model that is loaded already and the format of its cache.
        max_length: tokens of context and answer; the model's own maximum where None.
        kv_cache_dtype, kv_cache_dtype_skip_layers, attention, missing_scales: as for `LLM`.
        batch_size, max_batch_size: taken, because the harness passes them; not used.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        run: Run | None = None,
        max_length: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_dtype_skip_layers: Sequence[str | int] | None = None,
        attention: Any = "accurate",
        missing_scales: str = "refuse",
        device: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        if run is None:
            if pretrained is None:
                raise ValueError("give pretrained=MODEL")
            loaded = load(
                pretrained,
                device=device or "auto",
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
            choice = choose_kv_format(
                loaded, kv_cache_dtype, kv_cache_dtype_skip_layers, attention, missing_scales
            )
            for warning in choice.warnings:
                console.warn(warning)
            run = Run(Variant("fp8calib", pretrained, choice.kv_format), loaded)
        self.run = run
        self.tokenizer = run.loaded.tokenizer
        self.max_length = min(max_length or run.loaded.max_model_len, run.loaded.max_model_len)
        self._device = run.loaded.model.device

    @property
    def eot_token_id(self) -> int:
        own = self.tokenizer.eos_token_id
        return own if own is not None else min(self.run.loaded.eos_token_ids, default=0)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.run.loaded.name

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        if add_special_tokens is None:  # as when serving, but no second BOS
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        encoded = self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False)
        return encoded["input_ids"]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """For each request, the log-probability of its last part given the one before it, and
        whether greedy generation would give it."""
        rows = [(context + answer)[-self.max_length - 1 :] for _, context, answer in requests]
        counts = [
            min(len(answer), len(row) - 1)
            for (_, _, answer), row in zip(requests, rows, strict=True)
        ]
        sums, greedy = [0.0] * len(rows), [True] * len(rows)
        limit = _GPU_TOKENS if self._device.type == "cuda" else _CPU_TOKENS
        pieces = self.run.score([row[:-1] or row for row in rows], limit)
        with console.progress("scoring (tokens)", sum(map(len, rows))) as bar:
            for piece in pieces:
                row = rows[piece.row]
                # logits[i] is about token start + i + 1; the last `count` tokens are wanted
                first = max(0, len(row) - counts[piece.row] - 1 - piece.start)
                targets = row[piece.start + first + 1 :][: len(piece.logits) - first]
                if len(piece.logits) > first and targets:
                    logits = piece.logits[first : first + len(targets)].float()
                    wanted = torch.tensor(targets, device=logits.device)
                    chosen = logits.log_softmax(-1).gather(-1, wanted[:, None])
                    sums[piece.row] += float(chosen.double().sum())
                    greedy[piece.row] &= bool((logits.argmax(-1) == wanted).all())
                bar.advance(len(piece.logits))
        found = list(zip(sums, greedy, strict=True))
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        windows: list[Any] = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            parts = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for part in map(make_disjoint_window, parts):
                windows.append((None, *part))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            wanted = options.get("max_gen_toks", options.get("max_new_tokens", _MAX_GEN_TOKENS))
            new = min(int(wanted), self.max_length - 1)
            prompts.append(self.tok_encode(context)[-(self.max_length - new) :])
            params.append(
                SamplingParams(
                    max_tokens=new,
                    temperature=options.get("temperature", 0.0) if options.get("do_sample") else 0,
                    top_p=options.get("top_p", 1.0),
                    top_k=options.get("top_k", 0),
                    stop=[s for s in handle_stop_sequences(options.get("until"), None) if s],
                )
            )
        longest = max(len(p) + (s.max_tokens or 0) for p, s in zip(prompts, params, strict=True))
        engine = make_engine(self.run, min(_NUM_SEQS, len(prompts)), longest)
        queued = [
            engine.add_request(one, prompt_token_ids=ids)
            for ids, one in zip(prompts, params, strict=True)
        ]
        with console.progress("generating (answers)", len(queued)) as bar:
            while engine.has_unfinished_requests:
                bar.advance(sum(request.finish_reason is not None for request in engine.step()))
        return [request.text for request in queued]
