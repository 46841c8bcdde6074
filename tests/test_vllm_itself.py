"""A real vLLM drafts with our proposer: run where one is installed, or where PACELINE_VLLM_PYTHON names its Python."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

VARIABLE = "PACELINE_VLLM_PYTHON"
ROOT = Path(__file__).parent.parent
PROGRAM = """
import json, sys
import vllm

def texts(**options):
    options |= {"max_model_len": 512, "max_num_seqs": 3, "enforce_eager": True, "kv_cache_memory_bytes": 128 << 20}
    llm = vllm.LLM(sys.argv[1], dtype="float32", **options)
    line = "Say it again: the cat sat on the mat, the dog lay on the log, the cat sat on the"
    prompts = [f"{line} mat.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4,", "The capital of France is", line]
    params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (24, 8, 16, 24)]  # rows move
    outputs = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    core = llm.llm_engine.engine_core.engine_core
    return outputs, core.model_executor.driver_worker.worker.model_runner

plain, _ = texts()
found = {}
for method in ("ngram", "suffix", "merge"):
    drafted, runner = texts(
        speculative_config={"method": "custom_class", "model": "paceline.vllm_proposer.Proposer",
                            "num_speculative_tokens": 4},
        additional_config={"paceline": {"method": method}},
    )
    figures = runner.drafter.speculator.stats()[method]
    found[method] = [drafted == plain, figures["num_accepted_tokens"], figures.get("num_failures", 0)]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    VARIABLE not in os.environ and importlib.util.find_spec("vllm") is None,
    reason=f"vLLM is not installed: name an interpreter that has it in {VARIABLE}",
)
def test_texts_are_those_of_plain_decoding_and_drafts_are_accepted(smollm2: Path) -> None:
    own = {"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [os.environ.get(VARIABLE, sys.executable), "-c", PROGRAM, str(smollm2)],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | own | {"HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for method, (same, num_accepted, num_failures) in json.loads(done.stdout.strip().splitlines()[-1]).items():
        assert same and num_accepted > 4 and not num_failures, method
