"""vLLM's own examples, run here: with nothing changed but import, model and URL.

    python benchmarks/vllm_examples.py FOLDER            # vLLM's `examples`, of its source distribution
    python benchmarks/vllm_examples.py FOLDER --only basic/offline_inference/chat.py

The folder is fetched by whoever runs this (vLLM's source archive has it); nothing of it is kept here. What is changed
in each file: names of modules (`MODULES`: the table of docs/from-vllm.md), the model, the drafter, the server's
address, the prefix of metrics. An example passes when it ends with 0. One that needs what we lack must fail with our
stated reason. Prints a table, then one JSON line.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

MODEL = "smollm2-135m"
# vLLM's module -> where its names are here
MODULES = {
    "vllm.utils.argparse_utils": "from argparse import ArgumentParser as FlexibleArgumentParser",
    "vllm.utils.print_utils": "from builtins import print as print_embeddings",
    "vllm.distributed": "from gc import collect as cleanup_dist_env_and_memory",
    "vllm.v1.engine.async_llm": "paceline",
    "vllm.v1.metrics.reader": "paceline.llm.metrics",
    "vllm.config": "paceline.llm.profile",
    "vllm.sampling_params": "paceline.sampling_params",
    "vllm.outputs": "paceline.outputs",
    "vllm.engine.arg_utils": "paceline.engine.arg_utils",
    "vllm": "paceline",
}
OFFLINE = {  # example -> arguments
    "basic/offline_inference/basic.py": "",
    "basic/offline_inference/chat.py": "--max-tokens 24",
    "basic/offline_inference/generate.py": "--max-tokens 24 --temperature 0.5",
    "basic/offline_inference/classify.py": "",
    "basic/offline_inference/embed.py": "",
    "deployment/async_llm_streaming.py": "",
    "deployment/llm_engine_example.py": "",
    "features/automatic_prefix_caching/automatic_prefix_caching_offline.py": "",
    "features/automatic_prefix_caching/prefix_caching_offline.py": "",
    "features/batch_invariance/reproducibility_offline.py": "",
    "features/pause_resume/pause_resume_offline.py": "",
    "features/profiling/run_one_batch_offline.py": "",
    "features/profiling/simple_profiling_offline.py": "",
    "features/reset_kv/reset_kv_offline.py": "",
    "features/structured_outputs/structured_outputs_offline.py": "",
    "observability/metrics/offline.py": "",
}
ONLINE = {
    "basic/online_serving/openai_chat_completion_client.py": "",
    "basic/online_serving/openai_chat_completion_client.py ": "--stream",
    "basic/online_serving/openai_completion_client.py": "",
    "basic/online_serving/openai_completion_client.py ": "--stream",
    "reasoning/openai_chat_completion_with_reasoning.py": "",
    "reasoning/openai_chat_completion_with_reasoning_streaming.py": "",
    "features/structured_outputs/structured_outputs_client.py": "",
    "tool_calling/openai_chat_completion_client_with_tools.py": "",
    "tool_calling/openai_chat_completion_client_with_tools_required.py": "",
    "generate/batched_chat_completions_online.py": "",
}
MORE = {  # beyond the basic ones: text and speculation too, or refused
    "features/speculative_decoding/mlpspeculator_offline.py": "",
    "features/context_extension/context_extension_offline.py": "",
    "features/logits_processor/custom.py": "",
    "features/lora/multilora_offline.py": "",
}
MODEL_NAME = re.compile(r"""(["'])(?:facebook|meta-llama|Qwen|lmsys|jason9693|intfloat|mistralai|unsloth)/[\w.-]+\1""")
DRAFTER_NAME = re.compile(r"""(["'])(?:ibm-ai-platform|yuhuili)/[\w.-]+\1""")
IMPORT = re.compile(r"^from (vllm[\w.]*) import", re.MULTILINE)


def changed(source: str, url: str, drafter: Path) -> str:
    """The example with our imports, model, drafter and address."""

    def ours(found: re.Match[str]) -> str:
        place = MODULES.get(found[1], found[1].replace("vllm", "paceline", 1))
        return place + "  #" if place.startswith("from ") else f"from {place} import"

    source = IMPORT.sub(ours, source)
    source = MODEL_NAME.sub(f'"{MODEL}"', source)
    source = DRAFTER_NAME.sub(json.dumps(str(drafter)), source)
    source = source.replace('"vllm:', '"paceline:').replace("http://localhost:8000", url)
    return source.replace("max_model_len=100)", "max_model_len=2048)")


def run(path: Path, arguments: str, url: str, seconds: float) -> tuple[bool, str, float]:
    """Whether it ended well, else the last line of what it said, and how long it took."""
    import paceline.models.drafters.load as load

    drafter = next(load.SHIPPED.glob("*/eagle3.safetensors"))
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / path.name
        script.write_text(changed(path.read_text(), url, drafter))
        environment = os.environ | {"OPENAI_API_KEY": "EMPTY", "OPENAI_BASE_URL": f"{url}/v1"}
        environment |= {"VLLM_BASE_URL": url, "VLLM_MODEL": MODEL, "PYTHONPATH": str(Path(__file__).parents[1])}
        try:
            done = subprocess.run(
                [sys.executable, str(script), *arguments.split()],
                capture_output=True, text=True, timeout=seconds, cwd=folder, env=environment, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, f"no end within {seconds:g} s", seconds
    return done.returncode == 0, stated_reason(done.stderr) if done.returncode else "", time.monotonic() - begin_s


def stated_reason(said: str) -> str:
    """The last line; of a client that hides what the server answered, that answer, asked for once more."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    refused = re.search(r"error '4\d\d [\w ]+' for url '(http[^']+)'", said)
    if refused is None:
        return lines[-1] if lines else ""
    request = urllib.request.Request(refused[1], data=b"{}", headers={"content-type": "application/json"})
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        return str(json.load(error)["error"]["message"])
    return lines[-1]


def start_server() -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "paceline", "serve", MODEL, "--port", str(port), "--reasoning-parser", "qwen3"]
    command += ["--override-generation-config", '{"max_new_tokens": 200}']  # a small model does not come to an end
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    server = subprocess.Popen([sys.executable, *command], stderr=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    for _ in range(240):
        try:
            urllib.request.urlopen(f"{url}/health")
            return server, url
        except OSError:
            time.sleep(0.5)
    server.kill()
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="one example; may be repeated")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of one example")
    args = parser.parse_args()
    server, url = None, "http://127.0.0.1:9"
    results: dict[str, dict[str, object]] = {}
    try:
        for kind, examples in (("offline", OFFLINE), ("online", ONLINE), ("more", MORE)):
            chosen = {name: words for name, words in examples.items() if not args.only or name.strip() in args.only}
            if kind == "online" and chosen:
                server, url = start_server()
            for name, words in chosen.items():
                passed, reason, seconds = run(args.folder / name.strip(), words, url, args.timeout)
                label = f"{name.strip()} {words}".strip()
                results[f"{kind}: {label}"] = {"passed": passed, "reason": reason, "seconds": round(seconds, 1)}
                print(
                    f"{kind:8}{'passed' if passed else 'FAILED':8}{seconds:6.1f} s  {label}  {reason[:160]}", flush=True
                )
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    for kind in ("offline", "online", "more"):
        own = [bool(result["passed"]) for name, result in results.items() if name.startswith(kind)]
        print(f"{kind}: {sum(own)} of {len(own)}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
