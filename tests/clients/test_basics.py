"""Other people's clients do their ordinary work with our server: text, streams, several samples, errors."""

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.outside import environment, interpreter, needs, npm_folder, run_client
from tests.serve import fake
from tests.serve.conftest import running

LITELLM = """
import json, sys, litellm
options = dict(model="openai/fake", api_base=sys.argv[1] + "/v1", api_key="none", max_tokens=8, seed=1)
messages = [{"role": "user", "content": "Hi"}]
whole = litellm.completion(messages=messages, temperature=0, **options)
stream = litellm.completion(messages=messages, stream=True, **options)
parts = [chunk.choices[0].delta.content or "" for chunk in stream]
text = litellm.text_completion(prompt="Hi", **{**options, "model": "text-completion-openai/fake"})
print(json.dumps([whole.choices[0].message.content, "".join(parts), text.choices[0].text, whole.usage.total_tokens]))
"""
LANGCHAIN = """
import json, sys
from langchain_openai import ChatOpenAI, OpenAI
options = dict(model="fake", base_url=sys.argv[1] + "/v1", api_key="none", max_tokens=8, seed=1)
chat = ChatOpenAI(**options)
whole = chat.invoke("Hi")
parts = [chunk.content for chunk in chat.stream("Hi")]
logprobs = chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
batch = [answer.content for answer in chat.batch(["Hi", "Hi"])]
text = OpenAI(**options).invoke("Hi")
print(json.dumps([whole.content, "".join(parts), text, len(logprobs), batch, whole.usage_metadata["total_tokens"]]))
"""
OPENAI = """
import json, sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
messages = [{"role": "user", "content": "Hi"}]
options = dict(model="fake", messages=messages, max_tokens=8, seed=1)
whole = client.chat.completions.create(**options)
stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
chunks = list(stream)
parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
more = {"top_k": 5, "ignore_eos": True}
text = client.completions.create(model="fake", prompt="Hi", max_tokens=8, seed=1, extra_body=more)
try:
    client.chat.completions.create(**options, extra_body={"temprature": 1})
except openai.BadRequestError as error:
    refused = error.body["message"]
names = [model.id for model in client.models.list()]
print(json.dumps([whole.choices[0].message.content, "".join(parts), text.choices[0].text, refused, names,
                  chunks[-1].usage.completion_tokens]))
"""
NPM = """
const OpenAI = require("openai").default ?? require("openai");
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none" });
(async () => {
  const ask = { model: "fake", messages: [{ role: "user", content: "Hi" }], max_tokens: 8, seed: 1 };
  const whole = await client.chat.completions.create(ask);
  let parts = "";
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true }))
    parts += chunk.choices[0]?.delta?.content ?? "";
  const text = await client.completions.create({ model: "fake", prompt: "Hi", max_tokens: 8, seed: 1 });
  console.log(JSON.stringify([whole.choices[0].message.content, parts, text.choices[0].text]));
})();
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(fake.FakeBackend()) as handle:
        yield handle.url


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What the fake engine answers: to the chat, to the chat again, and to the text."""
    tokenizer = fake.ByteTokenizer()
    chat = tokenizer.chat_token_ids([{"role": "user", "content": "Hi"}])
    texts = [fake.expected_text(prompt, 1, 0, 8) for prompt in (chat, tokenizer.encode("Hi"))]
    return [texts[0], texts[0], texts[1]]


@needs("litellm", "litellm")
def test_litellm(url: str, expected: list[str]) -> None:
    found = run_client(LITELLM, url)
    assert found[:3] == expected and found[3] > 8


@needs("langchain_openai", "langchain-openai")
def test_langchain(url: str, expected: list[str]) -> None:
    found = run_client(LANGCHAIN, url)
    assert found[:3] == expected and found[3:5] == [8, expected[:2]] and found[5] > 8


@needs("openai", "openai")
def test_openai(url: str, expected: list[str]) -> None:
    found = run_client(OPENAI, url)
    assert found[:3] == expected and "temperature" in found[3]
    assert found[4] == ["fake", "other-name"] and found[5] == 8


@needs("llm", "llm")
def test_simon_willisons_llm(url: str, expected: list[str], tmp_path: Any) -> None:
    model = {"model_id": "ours", "model_name": "fake", "api_base": f"{url}/v1", "api_key_name": "none"}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    for more in ([], ["--no-stream"]):
        command = [interpreter(), "-m", "llm", "-m", "ours", "-o", "max_tokens", "8", "-o", "seed", "1", *more, "Hi"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120,
            env=environment(LLM_USER_PATH=str(tmp_path)), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.stdout.strip() == expected[0].strip(), done.stderr


@needs("guidellm", "guidellm")
@pytest.mark.slow  # it loads a tokenizer and starts several processes
def test_guidellm_measures_without_an_error(url: str, tmp_path: Any, smollm2: Any) -> None:
    words = [
        "run", "--backend", f"kind=openai_http,target={url},model=fake", "--profile", "kind=synchronous",
        "--constraint", "kind=max_requests,count=3", "--tokenizer", f"kind=huggingface_auto,model={smollm2}",
        "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8", "--disable-console",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
    ]  # fmt: skip
    done = subprocess.run(
        [interpreter(), "-m", "guidellm", *words], capture_output=True, text=True, check=False, timeout=300,
        env=environment(), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = report["requests"]
    assert len(requests["successful"]) == 3 and not requests["errored"]


NPM_AI = """
import { createRequire } from "node:module";
const require = createRequire(process.argv[3] + "/");
const { createOpenAICompatible } = await import(require.resolve("@ai-sdk/openai-compatible"));
const { generateText, streamText } = await import(require.resolve("ai"));
const provider = createOpenAICompatible({ name: "ours", baseURL: process.argv[2] + "/v1" });
const ask = { model: provider.chatModel("fake"), prompt: "Hi", maxOutputTokens: 8, seed: 1 };
const { text } = await generateText(ask);
let parts = "";
for await (const part of streamText(ask).textStream) parts += part;
console.log(JSON.stringify([text, parts]));
"""


@pytest.mark.skipif(
    npm_folder("@ai-sdk/openai-compatible") is None or npm_folder("ai") is None,
    reason="node's ai is not there: npm install ai @ai-sdk/openai-compatible, and set NODE_PATH",
)
def test_the_npm_package_ai(url: str, expected: list[str], tmp_path: Any) -> None:
    (tmp_path / "ask.mjs").write_text(NPM_AI)
    done = subprocess.run(
        ["node", str(tmp_path / "ask.mjs"), url, str(npm_folder("ai"))],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.strip().splitlines()[-1]) == expected[:2]


@pytest.mark.skipif(
    npm_folder("openai") is None, reason="node's openai is not there: npm install openai, set NODE_PATH"
)
def test_the_npm_package_of_openai(url: str, expected: list[str]) -> None:
    folder = npm_folder("openai")
    done = subprocess.run(
        ["node", "-", url], input=NPM, capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"NODE_PATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
