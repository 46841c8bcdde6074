"""One peer engine in its own interpreter, driven over standard input and output by benchmarks/cpu.py.

    python benchmarks/cpu_peers.py NAME MODEL_FOLDER GGUF_FILE THREADS CONTEXT

Answers one JSON line per request line: {"prompts": [[token ids], ...], "max_tokens": n, "lookup": bool} gives
{"ttft_s", "total_s", "num_tokens"}, where num_tokens counts ids of all prompts together. With "logits_to": PATH it
writes the logits after each token of the first prompt there instead ([tokens, vocab] .npy). The first line says whether
the engine is there and its version. Needs nothing of Paceline, so that the peer's environment can be its own.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

LOOKUP_TOKENS = 10
Prompts = list[list[int]]


class LlamaCpp:
    package = "llama-cpp-python"
    batches = False

    def __init__(self, folder: str, gguf: str, threads: int, context: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        options: dict[str, Any] = {"n_ctx": context, "n_threads": threads, "verbose": False}
        options["n_threads_batch"] = threads
        self.plain = Llama(gguf, **options)
        lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)
        self.lookup = Llama(gguf, **options, draft_model=lookup)
        self.scoring = lambda: Llama(gguf, **options, logits_all=True)

    def logits(self, token_ids: list[int]) -> Any:
        llama = self.scoring()
        llama.eval(token_ids)
        return llama.scores[: len(token_ids)].copy()

    def run(self, prompts: Prompts, max_tokens: int, lookup: bool) -> tuple[float, int]:
        llama = self.lookup if lookup else self.plain
        llama.reset()
        first, count = 0.0, 0
        for _ in llama.generate(prompts[0], temp=0.0, top_k=1):
            first = first or time.perf_counter()
            count += 1
            if count == max_tokens:
                break
        return first, count


class OpenVino:
    package = "openvino-genai"
    batches = True

    def __init__(self, folder: str, gguf: str, threads: int, context: int) -> None:
        import openvino_genai

        self.genai = openvino_genai
        options = {"INFERENCE_NUM_THREADS": threads}
        # Its pipelines keep prompts between calls unless told not to, and then a prompt's second run has no prefill.
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, 1
        scheduler.max_num_batched_tokens = max(4096, context)
        self.plain = openvino_genai.LLMPipeline(gguf, "CPU", scheduler_config=scheduler, **options)
        self.lookup = openvino_genai.LLMPipeline(gguf, "CPU", scheduler_config=scheduler, prompt_lookup=True, **options)

    def run(self, prompts: Prompts, max_tokens: int, lookup: bool) -> tuple[float, int]:
        import numpy as np
        import openvino

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
        config.apply_chat_template = False
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, 3
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = prompt, 1
        inputs = self.genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        started = time.perf_counter()
        result = (self.lookup if lookup else self.plain).generate(inputs, config)
        first = started + result.perf_metrics.get_ttft().mean / 1e3
        return first, sum(len(tokens) for tokens in result.tokens)


class Transformers:
    package = "transformers"
    batches = True

    def __init__(self, folder: str, gguf: str, threads: int, context: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(self, prompts: Prompts, max_tokens: int, lookup: bool) -> tuple[float, int]:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        times: list[float] = []

        def note_time(input_ids: Any, scores: Any) -> Any:
            times.append(time.perf_counter())
            return scores

        options: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if lookup else {}
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            logits_processor=[note_time],
            **options,
        )
        return times[0], out.shape[0] * (out.shape[1] - width)


def save_logits(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    np.save(request["logits_to"], peer.logits(request["prompts"][0]))
    return {}


PEERS: dict[str, Any] = {"llama.cpp": LlamaCpp, "openvino": OpenVino, "transformers": Transformers}


def main() -> None:
    name, folder, gguf, threads, context = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    try:
        peer_class = PEERS[name]
        peer = peer_class(folder, gguf, int(threads), int(context))
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    ready = {"version": version(peer_class.package), "batches": peer_class.batches}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.perf_counter()
        answer: dict[str, Any]
        try:
            if "logits_to" in request:
                answer = save_logits(peer, request)
            else:
                first, count = peer.run(request["prompts"], request["max_tokens"], request["lookup"])
                total = time.perf_counter() - started
                answer = {"ttft_s": first - started, "total_s": total, "num_tokens": count}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
