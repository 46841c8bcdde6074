"use strict";
// Streams an answer and colours every token by who drafted it.

const WORDS = {
  target: "no draft", recovered: "correction: the draft was wrong here", bonus: "bonus: the whole draft held, one more for free",
};
let running = null;

function request() {
  const body = {
    messages: [{ role: "user", content: $("prompt").value }],
    temperature: Number($("temperature").value), max_tokens: Number($("max-tokens").value),
    stream: true, stream_options: { include_usage: true }, return_speculation: true, return_token_sources: true,
  };
  if (!$("speculate").checked) body.speculative = { off: true };
  else if ($("method").value) body.speculative = { method: $("method").value };
  const schema = $("schema").value.trim();
  if (schema) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: JSON.parse(schema) } };
  }
  return body;
}

async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
  }
}

function showToken(piece, seen) {
  const span = element("span", piece.text, "t");
  span.style.background = colourOf(piece.source);
  span.dataset.source = piece.source;
  span.title = WORDS[piece.source] || `drafted by ${piece.source}`;
  const box = $("answer"), following = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  box.append(span);
  if (following) box.scrollTop = box.scrollHeight;
  if (!seen.has(piece.source)) {
    seen.add(piece.source);
    const entry = element("span"), sample = element("i");
    sample.style.background = colourOf(piece.source);
    if (piece.source === "target") sample.style.border = "1px solid var(--line)";
    entry.append(sample, WORDS[piece.source] || `drafted by ${piece.source}`);
    $("legend").append(entry);
  }
}

function showFigures(event, begin, firstAt) {
  const { speculation: s, usage: u } = event, now = performance.now();
  const figures = [
    [u.completion_tokens, "tokens"], [((1000 * u.completion_tokens) / (now - begin)).toFixed(1), "tokens/s"],
    [milliseconds((firstAt - begin) / 1000), "to the first"], [s.num_steps, "target passes"],
    [s.mean_acceptance_length.toFixed(2), "tokens per pass"], [percent(s.draft_acceptance_rate), "of drafts accepted"],
  ];
  $("figures").replaceChildren(...figures.map(([value, label]) => {
    const figure = element("span");
    figure.append(element("b", `${value}`), ` ${label}`);
    return figure;
  }));
}

function showError(message) {
  $("answer").append(element("div", message, "error"));
}

async function run(signal) {
  let body;
  try {
    body = request();
  } catch (error) {
    return showError(`The schema is not JSON: ${error.message}`);
  }
  const begin = performance.now(), seen = new Set();
  let firstAt = null;
  const answer = await fetch("v1/chat/completions", {
    method: "POST", headers: headers({ "Content-Type": "application/json" }), body: JSON.stringify(body), signal,
  });
  if (!answer.ok) return showError((await answer.json()).error.message);
  for await (const event of eventsOf(answer.body)) {
    if (event.error) return showError(event.error.message);
    for (const choice of event.choices) for (const piece of choice.token_sources || []) showToken(piece, seen);
    firstAt = firstAt || performance.now();
    if (event.speculation) showFigures(event, begin, firstAt);
  }
}

async function send() {
  if (running) running.abort();
  const mine = running = new AbortController();
  for (const id of ["answer", "legend", "figures"]) $(id).replaceChildren();
  $("stop").hidden = false;
  try {
    await run(mine.signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(`The connection broke: ${error.message}`);
  }
  if (running === mine) {
    running = null;
    $("stop").hidden = true;
  }
}

$("send").addEventListener("click", send);
$("stop").addEventListener("click", () => running && running.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
});
