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
    batches = True

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
        if len(prompts) > 1:
            return LlamaSlots(self.plain, prompts, max_tokens).run()
        llama = self.lookup if lookup else self.plain
        llama.reset()
        first, count = 0.0, 0
        for _ in llama.generate(prompts[0], temp=0.0, top_k=1):
            first = first or time.perf_counter()
            count += 1
            if count == max_tokens:
                break
        return first, count


class LlamaSlots:
    """What llama.cpp's server does with requests that come together, which its Python binding does not offer: a step
    computes a token of each request that decodes, then prompts, as many tokens as a batch holds."""

    BATCH = 2048  # the server's default

    def __init__(self, llama: Any, prompts: Prompts, max_tokens: int) -> None:
        import llama_cpp

        self.lib, self.prompts, self.max_tokens = llama_cpp, prompts, max_tokens
        options = llama_cpp.llama_context_default_params()
        of_model = llama.context_params
        options.n_threads, options.n_threads_batch = of_model.n_threads, of_model.n_threads_batch
        options.n_seq_max, options.n_batch = len(prompts), self.BATCH
        options.n_ctx = len(prompts) * (max(map(len, prompts)) + max_tokens + 256)  # shared out evenly
        self.model = llama.model
        self.num_tokens = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)

    def run(self) -> tuple[float, int]:
        done = [0] * len(self.prompts)  # tokens computed
        texts = [list(prompt) for prompt in self.prompts]
        ends = [len(prompt) + self.max_tokens for prompt in self.prompts]
        first = 0.0
        while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
            for request, row in self._step(texts, done, ends):
                texts[request].append(self._likeliest(row))
            if not first and all(len(text) > len(prompt) for text, prompt in zip(texts, self.prompts, strict=True)):
                first = time.perf_counter()  # of the last request
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        return first, len(self.prompts) * self.max_tokens

    def _step(self, texts: Prompts, done: list[int], ends: list[int]) -> list[tuple[int, int]]:
        """One pass. The requests of which a token can be drawn, each with its row."""
        batch, wanted, count = self.batch, [], 0
        running = [i for i in range(len(texts)) if len(texts[i]) < ends[i]]
        for i in sorted(running, key=lambda i: len(texts[i]) - done[i] > 1):  # those that decode first
            text = texts[i]
            for position in range(done[i], min(len(text), done[i] + self.BATCH - count)):
                batch.token[count], batch.pos[count] = text[position], position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, i
                batch.logits[count] = position == len(text) - 1
                if position == len(text) - 1:
                    wanted.append((i, count))
                done[i] = position + 1
                count += 1
        batch.n_tokens = count
        status = self.lib.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        return wanted

    def _likeliest(self, row: int) -> int:
        import numpy as np

        return int(np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, row), (self.num_tokens,)).argmax())


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
