"""The engine on a GPU: tokens per second, where a step's time goes, how long the GPU waits, and whether it is exact.

    python benchmarks/gpu.py PROMPTS.jsonl [--model smollm2-135m] [--batches 1,8,32,128] [--methods none,ngram,auto]
    python benchmarks/gpu.py PROMPTS.jsonl --temperature 1 --only speed
    python benchmarks/gpu.py PROMPTS.jsonl --device cpu --tiny     # rehearsal without a GPU: a tiny model, plain passes

PROMPTS.jsonl has Spec-Bench's form. Sections (each goes on when another fails):

- passes: milliseconds of a captured pass by number of rows, drawing tokens alone and writing logits as well
- speed: per batch and method, `--tokens` new tokens for each prompt, with the time to read the prompts counted;
  the step by part (ms), the share of the time in which the GPU did not run a target pass, and the limit: the bytes of
  weights and keys of a pass over the bandwidth, times the tokens that a pass brought
- exact: the tokens of plain decoding alone beside those in a batch and with each drafter, greedy and at temperature 1
- ttft: time to the first token by length of the prompt, beside the operations over FLOP/s
- gap: a request's longest time between two tokens, alone and while a prompt of 8,192 tokens is read

Prints tables, then one JSON line. Prefix caching is off: a prompt that comes again is read again.
"""

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_setup import (
    MAX_PROMPT,
    Run,
    clock_of,
    load,
    make_llm,
    pass_limit_s,
    prompt_ids,
    run_groups,
    time_passes,
    weight_numbers,
)

from paceline import LLM, SamplingParams
from paceline.bench.run.provenance import provenance
from paceline.core.request import Request

SECTIONS = ["passes", "speed", "exact", "ttft", "gap"]
GROUPS = {1: 6, 8: 3, 32: 2, 128: 1}  # groups of prompts that a cell answers one after another


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        begin = time.perf_counter()
        self.model = load(
            args.model,
            args.device,
            args.dtype,
            tiny=args.tiny,
            batch_invariant=args.batch_invariant,
            quantization=None if args.quantization == "none" else args.quantization,
        )
        print(f"{self.model.execution}; loaded in {time.perf_counter() - begin:.1f} s", flush=True)
        longest = min(MAX_PROMPT, 40 if args.tiny else MAX_PROMPT)
        self.prompts = prompt_ids(self.model, Path(args.prompts), longest)
        self.max_model_len = min(longest + args.tokens + 8, self.model.config.max_position)
        self.itemsize = self.model.decoder.dtype.itemsize

    def llm(self, method: str, max_num_seqs: int, max_model_len: int | None = None) -> LLM:
        gc.collect()
        if self.args.device == "cuda":
            torch.cuda.empty_cache()
        begin = time.perf_counter()
        length = max_model_len or self.max_model_len
        made = make_llm(self.model, method, self.args, max_num_seqs=max_num_seqs, max_model_len=length)
        clock_of(made).times_device = True
        print(f"  {method}: engine built in {time.perf_counter() - begin:.1f} s", flush=True)
        return made

    def passes(self) -> dict[str, Any]:
        llm = self.llm("none", max(self.args.batches))
        sizes = [1, 8] if self.args.tiny else [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
        found = time_passes(llm, sizes, 20 if self.args.tiny else 320)
        print(f"  {'rows':>6}" + "".join(f"{label:>20}" for label in next(iter(found.values()))) + f"{'limit':>10}")
        for rows, cells in found.items():
            requests = min(int(rows), max(self.args.batches))
            limit = pass_limit_s(self.model.config, self.itemsize, requests, 320, self.args.bandwidth) * 1e3
            cells["limit"] = limit
            figures = [value for label, value in cells.items() if label != "limit"]
            print(f"  {rows:>6}" + "".join(f"{value:20.3f}" for value in figures) + f"{limit:10.3f}", flush=True)
        return found

    def speed(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for method in self.args.methods:
            try:
                llm = self.llm(method, max(self.args.batches))
                for batch in self.args.batches:
                    found[f"{method} {batch}"] = self._cell(llm, method, batch)
                del llm
            except Exception:
                traceback.print_exc()
        return found

    def _cell(self, llm: LLM, method: str, batch: int) -> dict[str, Any]:
        args, groups = self.args, 1 if self.args.tiny else GROUPS.get(batch, 2)
        count = groups * batch
        chosen = [self.prompts[i % len(self.prompts)] for i in range(count)]
        others = [self.prompts[(count + i) % len(self.prompts)] for i in range(batch)]
        warm = 4 if args.tiny else 48
        run_groups(llm, others, batch, warm, args.temperature)  # compiles, captures, and lets `auto` look around
        run = run_groups(llm, chosen, batch, args.tokens, args.temperature)
        return self._show(run, method, batch)

    def _show(self, run: Run, method: str, batch: int) -> dict[str, Any]:
        context = run.num_prompt_tokens / len(run.outputs) + self.args.tokens / 2
        per_pass = run.num_tokens / max(1, run.num_steps)
        limit = per_pass / pass_limit_s(self.model.config, self.itemsize, batch, context, self.args.bandwidth)
        cell: dict[str, Any] = {
            "tokens_per_s": run.num_tokens / run.seconds,
            "limit_tokens_per_s": limit,
            "tokens_per_step": per_pass,
            "step_ms": 1e3 * run.seconds / max(1, run.num_steps),
            "gpu_ms": 1e3 * run.device_s / max(1, run.num_steps),
            "gpu_idle_share": 1.0 - run.device_s / run.seconds,
            "parts_ms": {name: 1e3 * s / max(1, run.num_steps) for name, s in run.parts.items()},
            "drafts_ms": {
                name.removesuffix("_s"): 1e3 * value / max(1, run.num_steps) if name.endswith("_s") else value
                for name, value in run.drafts.items()
            },
            "num_steps": run.num_steps,
            "num_captured": run.num_passes,
            "num_eager": run.num_eager,
            "seconds": run.seconds,
        }
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in cell["parts_ms"].items())
        print(
            f"  {method:8} batch {batch:3}: {cell['tokens_per_s']:9.0f} tok/s (limit {limit:9.0f}), "
            f"{per_pass:6.2f} tokens a step of {cell['step_ms']:.3f} ms (GPU {cell['gpu_ms']:.3f}, idle "
            f"{100 * cell['gpu_idle_share']:.0f} %), {run.num_eager} eager passes\n      {parts}",
            flush=True,
        )
        if run.drafts["num_drafts"]:
            print(
                "      captured drafts: " + ", ".join(f"{k} {v:.3f}" for k, v in cell["drafts_ms"].items()), flush=True
            )
        return cell

    def exact(self) -> dict[str, Any]:
        count, tokens = self.args.exact, min(self.args.tokens, 64)
        chosen = self.prompts[:count]
        found: dict[str, Any] = {"num_prompts": len(chosen)}
        expected: dict[float, list[list[int]]] = {}
        for method in ["none", *(m for m in self.args.methods if m != "none")]:
            llm = self.llm(method, min(len(chosen), max(self.args.batches)))
            for temperature in (0.0, 1.0):
                if method == "none":
                    expected[temperature] = self._seeded(llm, chosen, 1, tokens, temperature)
                answers = self._seeded(llm, chosen, len(chosen), tokens, temperature)
                differing = sum(a != b for a, b in zip(answers, expected[temperature], strict=True))
                found[f"{method} T={temperature:g}"] = differing
                print(f"  {method:8} T={temperature:g}: {differing} of {len(chosen)} answers differ", flush=True)
            del llm
        return found

    def _seeded(self, llm: LLM, prompts: list[list[int]], batch: int, tokens: int, heat: float) -> list[list[int]]:
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), batch):
            group = prompts[first : first + batch]
            params = [
                SamplingParams(temperature=heat, max_tokens=tokens, ignore_eos=True, seed=1000 + first + i)
                for i in range(len(group))
            ]
            answers = llm.generate([{"prompt_token_ids": ids} for ids in group], params)
            outputs += [list(answer.outputs[0].token_ids) for answer in answers]
        return outputs

    def ttft(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        longest = self.model.config.max_position
        llm = self.llm("none", 4, min(longest, 8192 + 16))
        vocab = self.model.config.vocab_size
        for length in [16, 64] if self.args.tiny else [128, 1024, 8192]:
            length = min(length, longest - 8)
            times = []
            for number in range(4):
                prompt = [(i * 7919 + number * 31 + 11) % (vocab - 100) + 50 for i in range(length)]
                begin = time.perf_counter()
                llm.generate([{"prompt_token_ids": prompt}], SamplingParams(temperature=0.0, max_tokens=1))
                times.append(time.perf_counter() - begin)
            took = statistics.median(times[1:])
            limit = 2 * weight_numbers(self.model.config) * length / self.args.flops
            found[str(length)] = {"ttft_ms": took * 1e3, "limit_ms": limit * 1e3}
            print(f"  prompt of {length:5}: {took * 1e3:8.2f} ms (limit {limit * 1e3:.3f})", flush=True)
        return found

    def gap(self) -> dict[str, Any]:
        config = self.model.config
        length = min(64 if self.args.tiny else 8192, config.max_position - 256)
        llm = self.llm("none", 4, length + 64)
        core = llm.engine.core

        def ask(name: str, size: int, tokens: int) -> Request:
            prompt = [(i * 7919 + 11) % (config.vocab_size - 100) + 50 for i in range(size)]
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
            request = Request(name, prompt, params, max_tokens=tokens, seed=1)
            core.add_request(request)
            return request

        def longest_gap(decoder: Request, until: Request, count: int) -> float:
            """Between tokens of the decoder, until that other one (or it) has so many."""
            gaps, last, seen = [0.0], time.perf_counter(), decoder.num_output_tokens
            while until.num_output_tokens < count:
                core.step()
                if decoder.num_output_tokens > seen:
                    now, seen = time.perf_counter(), decoder.num_output_tokens
                    gaps.append(now - last)
                    last = now
            return max(gaps)

        found: dict[str, Any] = {"prompt": length}
        for number in range(3):  # the first one compiles and captures
            decoder = ask(f"decoder {number}", 32, length)
            longest_gap(decoder, decoder, 8)
            alone = longest_gap(decoder, decoder, 40)
            reader = ask(f"reader {number}", length, 2)
            beside = longest_gap(decoder, reader, 1)
            found |= {"alone_ms": alone * 1e3, "beside_ms": beside * 1e3}
            for name in (decoder.request_id, reader.request_id):
                core.abort(name)
            while core.has_requests:
                core.step()
        print(f"  longest gap: {found['alone_ms']:.2f} ms alone, {found['beside_ms']:.2f} ms while {length} are read")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", help="none: widened to the dtype; auto: as in the file")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--methods", default="none,ngram,eagle3,auto")
    parser.add_argument("--drafter", help="a file for eagle3 or draft_model, for a model without a shipped one")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the section speed")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--exact", type=int, default=48, help="prompts of the section exact")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--no-batch-invariant", dest="batch_invariant", action="store_false", default=None)
    parser.add_argument("--bandwidth", type=float, default=4.3e12, help="bytes per second, for the limits")
    parser.add_argument("--flops", type=float, default=990e12, help="per second, for the limits")
    parser.add_argument("--json", default="", help="a file for the JSON line as well, written after every section")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for a rehearsal")
    args = parser.parse_args()
    args.batches = [int(batch) for batch in args.batches.split(",")]
    args.methods = args.methods.split(",")
    if args.tiny:
        args.tokens, args.exact = min(args.tokens, 12), min(args.exact, 4)
    record: dict[str, Any] = {}
    bench = Bench(args)
    for section in args.only.split(","):
        print(f"{section}:", flush=True)
        begin = time.perf_counter()
        work: Callable[[], dict[str, Any]] = {
            "passes": bench.passes,
            "speed": bench.speed,
            "exact": bench.exact,
            "ttft": bench.ttft,
            "gap": bench.gap,
        }[section]
        try:
            record[section] = work()
        except Exception:
            traceback.print_exc()
        print(f"  ({time.perf_counter() - begin:.0f} s)", flush=True)
        line = json.dumps(record | {"provenance": provenance(vars(args))})
        if args.json:
            Path(args.json).write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
