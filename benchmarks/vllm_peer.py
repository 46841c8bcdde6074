"""vLLM in its own interpreter, for benchmarks/vllm_export.py: one job file in, one result file out.

    python benchmarks/vllm_peer.py JOB.json RESULT.json

JOB: {"options": what vllm.LLM takes, "prompts": [[token ids], ...], "max_tokens": n}. Prompts run greedily, one at a
time, so that every engine step is one pass of the target for one request and can be counted. Needs nothing of Paceline.
"""

import json
import sys
from pathlib import Path
from typing import Any

PREFIX = "vllm:spec_decode_num_"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    import torch
    import vllm
    from vllm.sampling_params import RequestOutputKind

    llm = vllm.LLM(**job["options"])
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=job["max_tokens"], detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    answers = [answer(llm.llm_engine, str(i), ids, params) for i, ids in enumerate(job["prompts"])]
    result = {
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
        "outputs": [tokens for tokens, _ in answers],
        "steps": [steps for _, steps in answers],
        "counters": counters(llm),
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


def answer(engine: Any, name: str, token_ids: list[int], params: Any) -> tuple[list[int], int]:
    """The output, and how many passes emitted something."""
    engine.add_request(name, {"prompt_token_ids": token_ids}, params)
    tokens: list[int] = []
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            new = list(output.outputs[0].token_ids)
            tokens += new
            steps += bool(new)
    return tokens, steps


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own speculation counters: drafts, draft_tokens, accepted_tokens, accepted_tokens_per_pos."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(PREFIX):
            found[metric.name.removeprefix(PREFIX)] = metric.values if hasattr(metric, "values") else metric.value
    return found


if __name__ == "__main__":
    main()
