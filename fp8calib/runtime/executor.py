"""Runs a scheduled step: from requests to tensors, through model and sampler, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8calib.console import warn
from fp8calib.runtime.device_copy import to_device
from fp8calib.runtime.logprobs import LogprobTensors
from fp8calib.runtime.model_runner import ModelRunner
from fp8calib.runtime.request import Request, TokenLogprobs
from fp8calib.runtime.sampler import SampledTokens, Sampler, SamplingRow
from fp8calib.runtime.scheduler import ScheduledStep
from fp8calib.runtime.step_inputs import Chunk


@dataclass(frozen=True)
class StepInFlight:
    """A step that the device works on.

    requests: those that gain a token, in the order of `sampled`; prompts: log probabilities of
    pieces of prompts, and at which of a request's they start.
    """

    requests: list[Request]
    sampled: SampledTokens
    prompts: list[tuple[Request, int, LogprobTensors]]

    def wait(self) -> list[tuple[Request, int, TokenLogprobs | None]]:
        """The new token of each request, with its log probabilities if they were asked for. Those
        of prompts are put where they belong."""
        tokens, logprobs = self.sampled.wait()
        for request, start, entries in self.prompts:
            request.prompt_logprobs[start : start + len(entries.ranks)] = entries.lists()
        for request in self.requests:
            request.num_pending -= 1
        return [
            (request, token, logprobs.get(row))
            for row, (request, token) in enumerate(zip(self.requests, tokens, strict=True))
        ]


class StepExecutor:
    """A model and a sampler that work for the requests of one scheduler."""

    def __init__(self, runner: ModelRunner, sampler: Sampler) -> None:
        self.runner = runner
        self.sampler = sampler

    def start(self, step: ScheduledStep) -> StepInFlight:
        """Start a step that is not empty, and count its tokens as computed and pending; if it
        fails, nothing is counted."""
        for request in step.admitted:
            if request.params.penalized:
                assert request.slot is not None
                self.sampler.penalties.begin(
                    request.slot, request.prompt_token_ids, request.output_token_ids
                )
        # Single tokens first: the kernels attend them in another way than longer chunks.
        step.requests.sort(key=lambda item: item[1] > 1)
        chunks = [_chunk(request, count) for request, count in step.requests]
        logits, likeliest = self.runner.step(chunks, self.sampler)
        self._tell_of_failed_graphs()
        requests, last, prompts = [], [], []
        row = 0
        for (request, count), chunk in zip(step.requests, chunks, strict=True):
            if _of_prompt(request, count):
                of_chunk = logits[row : row + chunk.num_logits]
                prompts.append((request, request.num_computed, _prompt_logprobs(request, of_chunk)))
            row += chunk.num_logits
            if count == request.num_new:
                requests.append(request)
                last.append(row - 1)
        if len(last) < len(logits):
            at = to_device(last, torch.int64, logits.device)
            logits, likeliest = logits[at], likeliest[at]
        rows = [_sampling_row(request) for request in requests]
        sampled = self.sampler.sample(logits, rows, likeliest)
        # Only now: whatever fails before this can be tried again.
        for request, count in step.requests:
            request.num_computed += count
        for request in requests:
            request.num_pending += 1
        return StepInFlight(requests, sampled, prompts)

    def _tell_of_failed_graphs(self) -> None:
        graphs = self.runner.graphs
        if graphs is not None and graphs.failure is not None:
            self.runner.graphs = None
            warn(f"this model runs without CUDA graphs, which is slower: {graphs.failure}")


def _chunk(request: Request, count: int) -> Chunk:
    start = request.num_computed
    tokens = request.token_ids[start : start + count]
    assert request.slot is not None
    return Chunk(
        tokens,
        start,
        request.block_tables,
        num_logits=count if _of_prompt(request, count) else int(count == request.num_new),
        slot=request.slot,
        pending=len(tokens) < count,
    )


def _of_prompt(request: Request, count: int) -> bool:
    """Whether log probabilities are wanted of the prompt tokens that the next `count` predict."""
    return request.wants_prompt_logprobs and not request.num_output


def _prompt_logprobs(request: Request, logits: torch.Tensor) -> LogprobTensors:
    """Of the tokens that follow those of `logits` in the prompt; after its last one, none does."""
    start = request.num_computed + 1
    following = request.prompt_token_ids[start : start + len(logits)]
    tokens = to_device(following, torch.int64, logits.device)
    assert request.params.prompt_logprobs is not None
    logits = logits[: len(following)]
    return LogprobTensors.of(logits, tokens, request.params.prompt_logprobs).to_host()


def _sampling_row(request: Request) -> SamplingRow:
    assert request.slot is not None
    early = request.num_output < request.params.min_tokens
    return SamplingRow(
        request.params,
        request.seed,
        len(request.token_ids) + request.num_pending,
        request.slot,
        tuple(request.ending_token_ids) if early else (),
    )
