"use strict";
// Polls /api/live once a second and shows what changed.

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000, HISTORY = 120;
const speeds = [];
let last = null;

function headers(more) {
  const key = $("key").value;
  return Object.assign(key ? { Authorization: `Bearer ${key}` } : {}, more);
}

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const milliseconds = (s) => (s === null ? "–" : s >= 1 ? `${s.toFixed(1)} s` : `${Math.round(s * 1000)} ms`);
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

function tiles(now, speed) {
  const saved = Object.values(now.time_saved_s).reduce((sum, s) => sum + s, 0);
  const rows = [
    ["speed", speed.toFixed(1), "tokens/s"],
    ["running", `${now.num_running}`, `running of ${now.max_running}`],
    ["waiting", `${now.num_waiting}`, "waiting"],
    ["kv", percent(now.kv_usage), "KV cache in use"],
    ["ttft", milliseconds(now.ttft_s.p50), "to first token, p50"],
    ["gap", milliseconds(now.inter_token_s.p50), "between tokens, p50"],
    ["total", `${now.generation_tokens}`, "tokens generated"],
    ["saved", `${saved.toFixed(1)} s`, "saved (estimate)"],
  ];
  $("tiles").replaceChildren(...rows.map(([name, value, label]) => {
    const tile = element("div", undefined, "tile");
    tile.dataset.name = name;
    tile.append(element("b", value), element("span", label));
    return tile;
  }));
}

function spark(speed) {
  speeds.push(speed);
  if (speeds.length > HISTORY) speeds.shift();
  const top = Math.max(1, ...speeds);
  const points = speeds.map((v, i) => `${HISTORY - speeds.length + i},${46 - (44 * v) / top}`);
  $("spark").firstElementChild.setAttribute("points", points.join(" "));
}

function methods(speculation) {
  const drafted = Object.entries(speculation).filter(([, s]) => s.num_drafts > 0);
  if (!drafted.length) return;
  const table = element("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  for (const title of ["method", "tokens per pass", "accepted", "wasted nodes", "drafting"]) head.append(element("th", title));
  const charts = [];
  for (const [name, s] of drafted) {
    const row = body.insertRow();
    const cells = [name, s.mean_acceptance_length.toFixed(2), percent(s.draft_acceptance_rate), `${s.num_wasted_tokens}`, milliseconds(s.draft_s)];
    for (const text of cells) row.append(element("td", text));
    for (const [member, counts] of Object.entries(s.by_member)) {
      const part = body.insertRow();
      for (const text of [`↳ ${member}`, "", percent(counts.draft_acceptance_rate), `${counts.num_wasted_tokens}`, ""]) part.append(element("td", text));
    }
    charts.push(element("p", `${name}: accepted at position`, "name"), bars(s));
  }
  $("methods").replaceChildren(table, ...charts);
}

function bars(stats) {
  const holder = element("div", undefined, "bars");
  stats.accepted_per_position.forEach((count, i) => {
    const bar = element("div"), share = count / stats.num_drafts;
    bar.style.height = `${100 * share}%`;
    bar.dataset.label = `${i + 1}`;
    bar.title = `position ${i + 1}: ${percent(share)}`;
    holder.append(bar);
  });
  return holder;
}

const REASONS = {
  pays: "drafted: it pays", probe: "drafted: to see whether it would pay", too_expensive: "plain: drafts would cost more than they save",
  nothing_drafted: "plain: no drafter had a guess", skipped: "plain: drafts have not paid lately",
};

function decisions(speculation) {
  const found = Object.values(speculation).find((s) => s.decisions);
  if (!found) return;
  const made = found.decisions, table = element("table"), body = table.createTBody();
  const total = Object.values(made.reasons).reduce((sum, n) => sum + n, 0);
  for (const [reason, count] of Object.entries(made.reasons).sort((a, b) => b[1] - a[1])) {
    const row = body.insertRow();
    for (const text of [REASONS[reason] || reason, percent(count / total)]) row.append(element("td", text));
  }
  for (const [name, member] of Object.entries(made.members)) {
    const row = body.insertRow();
    for (const text of [`↳ ${member.reason}`, milliseconds(member.seconds)]) row.append(element("td", text));
  }
  const note = `${made.drafted_nodes} nodes drafted, ${made.offered_nodes} offered`;
  $("decisions").replaceChildren(element("p", made.last_decision, "name"), table, element("p", note, "name"));
}

function offerMethods(names) {
  const select = $("method");
  if (select.options.length > 1) return;
  for (const name of names) select.append(new Option(name, name));
}

function show(now) {
  const speed = last ? Math.max(0, (now.generation_tokens - last.generation_tokens) / (now.time_s - last.time_s)) : 0;
  last = now;
  $("model").textContent = now.model;
  tiles(now, speed);
  spark(speed);
  methods(now.speculation);
  decisions(now.speculation);
  offerMethods(now.methods);
  showCluster(now.cluster);
  if (now.trees.length) drawTree($("tree"), now.trees[now.trees.length - 1]);
}

function setStatus(text, good) {
  $("status").textContent = text;
  $("status").classList.toggle("bad", !good);
}

async function poll() {
  try {
    const answer = await fetch("api/live", { headers: headers() });
    $("key-label").hidden = answer.status !== 401 && !$("key").value;
    if (answer.ok) {
      const now = await answer.json();
      show(now);
      setStatus(now.draining ? "shutting down" : "live", !now.draining);
    } else setStatus(answer.status === 401 ? "needs an API key" : `error ${answer.status}`, false);
  } catch {
    setStatus("not reachable", false);
  }
  setTimeout(poll, POLL_MS);
}

poll();
