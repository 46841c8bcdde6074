"""The target writes answers to many prompts at once, as fast as plain PyTorch allows.

Prompts are sorted by length and answered in large batches with one dense cache each, so that a decode step is limited
by memory bandwidth and not by the host. Each answer has its own temperature (0 is greedy).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.target import DenseCache, DenseTarget

PREFILL_TOKENS = 65_536  # prompt tokens run together
SLOTS_STEP = 64  # attention looks at the cache up to a multiple of this
CHECK_EVERY = 16  # decode steps between checks whether all have finished: a check waits for the device


@dataclass(frozen=True, slots=True)
class AnswerJob:
    prompt: Sequence[int]
    temperature: float
    max_tokens: int


def write_answers(
    target: DenseTarget,
    jobs: Sequence[AnswerJob],
    *,
    cache_tokens: int,  # the cache of one batch holds at most this many positions
    max_batch: int = 2048,
    seed: int = 0,
    deadline_s: float = math.inf,  # on time.perf_counter(): no batch is begun after it
    on_progress: Callable[[int], None] = lambda finished: None,
) -> list[list[int]]:
    """One answer per job, in order; an end token is part of its answer. Empty where the deadline came first."""
    torch.manual_seed(seed)
    answers: list[list[int]] = [[] for _ in jobs]
    batches = _plan_batches(jobs, cache_tokens, max_batch)
    finished = 0
    for index in torch.randperm(len(batches)).tolist():  # so that a deadline does not favour short prompts
        if time.perf_counter() > deadline_s:
            break
        batch = batches[index]
        for i, answer in zip(batch, _answer_batch(target, [jobs[i] for i in batch]), strict=True):
            answers[i] = answer
        finished += len(batch)
        on_progress(finished)
    return answers


def _plan_batches(jobs: Sequence[AnswerJob], cache_tokens: int, max_batch: int) -> list[list[int]]:
    """Jobs of similar length together, as many as the cache holds."""
    order = sorted(range(len(jobs)), key=lambda i: len(jobs[i].prompt) + jobs[i].max_tokens)
    batches = []
    while order:
        longest = jobs[order[-1]]
        count = min(max_batch, max(1, cache_tokens // (len(longest.prompt) + longest.max_tokens)))
        batches.append(order[-count:])
        del order[-count:]
    return batches


def _answer_batch(target: DenseTarget, jobs: Sequence[AnswerJob]) -> list[list[int]]:
    device = target.device
    prompt_lens = torch.tensor([len(job.prompt) for job in jobs], device=device)
    max_tokens = max(job.max_tokens for job in jobs)
    longest = max(len(job.prompt) for job in jobs)
    length = -(-(longest + max_tokens) // SLOTS_STEP) * SLOTS_STEP
    cache = DenseCache(target, len(jobs), length)
    _prefill(target, jobs, cache)
    temperatures = torch.tensor([job.temperature for job in jobs], device=device)[:, None]
    limits = torch.tensor([job.max_tokens for job in jobs], device=device)
    eos = torch.tensor(target.config.eos_token_ids, device=device, dtype=torch.long)
    tokens = torch.tensor([job.prompt[-1] for job in jobs], device=device)
    written = torch.zeros(len(jobs), max_tokens, dtype=torch.long, device=device)
    finished_at = limits.clone()  # answer length, once known
    running = torch.ones(len(jobs), dtype=torch.bool, device=device)
    for step in range(max_tokens):
        visible = min(length, -(-(longest + step) // SLOTS_STEP) * SLOTS_STEP)
        logits = target.decode(tokens, prompt_lens - 1 + step, cache, visible)
        tokens = sample(logits, temperatures)
        written[:, step] = tokens
        ends_now = running & (torch.isin(tokens, eos) | (limits == step + 1))
        finished_at = torch.where(ends_now, step + 1, finished_at)
        running = running & ~ends_now
        if step % CHECK_EVERY == CHECK_EVERY - 1 and not bool(running.any()):
            break
    lengths = finished_at.tolist()
    return [row[:count] for row, count in zip(written.tolist(), lengths, strict=True)]


def _prefill(target: DenseTarget, jobs: Sequence[AnswerJob], cache: DenseCache) -> None:
    """All prompt tokens but the last, which is the first decode step's input."""
    begin = 0
    while begin < len(jobs):
        longest = max(1, max(len(job.prompt) for job in jobs[begin:]) - 1)
        end = min(len(jobs), begin + max(1, PREFILL_TOKENS // longest))
        padded = torch.zeros(end - begin, longest, dtype=torch.long)
        for row, job in enumerate(jobs[begin:end]):
            padded[row, : len(job.prompt) - 1] = torch.tensor(job.prompt[:-1], dtype=torch.long)
        target.prefill(padded.to(target.device), cache, begin)
        begin = end


def sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """argmax of logits / T plus Gumbel noise; T = 0 takes the argmax. logits: [rows, vocab], temperatures: [rows, 1]"""
    noise = torch.empty_like(logits).exponential_().clamp_(min=1e-20).log_()  # a zero would make 0 x inf of T = 0
    return (logits - temperatures * noise).argmax(-1)
