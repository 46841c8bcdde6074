"""lm-evaluation-harness against our server: log-likelihoods are those of transformers on the same tokens."""

from pathlib import Path

import pytest

from tests.clients.outside import needs, run_client, served

PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a small village in the mountains"),
    ("Two plus two equals", " four."),
    ("def add(a, b):\n    return", " a + b"),
]
HARNESS = """
import json, sys
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
url, folder, pairs = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
lm = LocalCompletionsAPI(base_url=url + "/v1/completions", model="smollm2-135m", tokenizer=folder,
                         tokenizer_backend="huggingface", num_concurrent=1, batch_size=2)
asked = [Instance("loglikelihood", {}, tuple(pair), i) for i, pair in enumerate(pairs)]
found = lm.loglikelihood(asked)
options = {"until": ["."], "max_gen_toks": 8, "temperature": 0}
ask = Instance("generate_until", {}, ("The capital of France is", options), 0)
print(json.dumps([[[float(score), bool(greedy)] for score, greedy in found], lm.generate_until([ask])]))
"""
# float32 on both sides, sums of at most eight log-probabilities that a server writes with all their digits
ROUNDING = 2e-3


@needs("lm_eval", "lm-eval")
@pytest.mark.slow  # a real model on both sides
def test_log_likelihoods_are_those_of_transformers(smollm2: Path) -> None:
    import json

    import torch
    import transformers

    with served("--dtype", "float32") as url:
        found, (text,) = run_client(HARNESS, url, str(smollm2), json.dumps(PAIRS), timeout_s=300)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for (context, continuation), (score, is_greedy) in zip(PAIRS, found, strict=True):
        prompt, whole = tokenizer(context)["input_ids"], tokenizer(context + continuation)["input_ids"]
        with torch.no_grad():
            logprobs = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        tokens = whole[len(prompt) :]
        rows = logprobs[len(prompt) - 1 : -1]
        expected = sum(float(rows[i, token]) for i, token in enumerate(tokens))
        assert score == pytest.approx(expected, abs=ROUNDING), continuation
        assert is_greedy == (rows.argmax(-1).tolist() == tokens)
    assert "Paris" in text
