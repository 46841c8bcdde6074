"""A tiny random Llama as a target, with answers that it wrote itself: enough to train every drafter in seconds."""

import torch

from paceline.core.model_config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.layout import expected_shapes
from paceline.train.corpus import Corpus
from paceline.train.sampler import AnswerJob, write_answers
from paceline.train.target import DenseTarget

CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)


def tiny_decoder(seed: int = 0) -> Decoder:
    """Random weights, large enough that the next token hangs on more than the last one."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 1.2 * shape[-1] ** -0.5
        for name, shape in expected_shapes(CONFIG).items()
    }
    return Decoder(CONFIG, weights)


def tiny_target(seed: int = 0) -> DenseTarget:
    return DenseTarget(tiny_decoder(seed))


def tiny_corpus(target: DenseTarget, num_prompts: int = 200, answer_tokens: int = 24, seed: int = 1) -> Corpus:
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for _ in range(num_prompts):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        prompts.append(torch.randint(1, CONFIG.vocab_size, (length,), generator=generator).tolist())
    jobs = [AnswerJob(prompt, 0.0, answer_tokens) for prompt in prompts]
    answers = write_answers(target, jobs, cache_tokens=100_000)
    return Corpus.build(prompts, answers, [0.0] * num_prompts)
