"use strict";
// The workers of a cluster, where its requests went, and who holds which prefixes. Uses `element` and `$` of live.js.

function rows(titles, lines) {
  const table = element("table"), head = table.createTHead().insertRow(), body = table.createTBody();
  for (const title of titles) head.append(element("th", title));
  for (const line of lines) {
    const row = body.insertRow();
    for (const text of line) row.append(element("td", text === null || text === undefined ? "–" : `${text}`));
  }
  return table;
}

function workers(list) {
  const titles = ["worker", "role", "decoding", "prompts queued", "tokens of these", "KV in use", "blocks cached", "sent", "fetched"];
  return rows(titles, list.map((w) => (w.up
    ? [w.worker, w.role, w.num_running, w.num_queued, w.queued_tokens, percent(w.kv_usage), w.num_blocks, w.num_sent_blocks, w.num_fetched_blocks]
    : [w.worker, w.role, `away: ${w.why || "not reached yet"}`])));
}

function placed(list) {
  const titles = ["request", "at", "worker", "attempt", "blocks cached there", "prompt computed by", "why"];
  return rows(titles, list.map((r) => [
    r.request_id, new Date(1000 * r.at_s).toLocaleTimeString(), r.worker, r.attempt, r.num_cached_blocks, r.prefill_worker || r.worker, r.reason,
  ]));
}

function prefixes(list) {
  const held = (holders) => Object.entries(holders).map(([name, count]) => `${name}: ${count}`).join(", ") || "nobody";
  return rows(["begins with", "blocks", "latest requests", "held by"], list.map((p) => [p.prefix, p.num_blocks, p.num_requests, held(p.holders)]));
}

function showCluster(cluster) {
  $("cluster").hidden = !cluster;
  if (!cluster) return;
  const note = cluster.num_resumed ? `${cluster.num_resumed} requests went on elsewhere; half of them stood still for less than ${milliseconds(cluster.recovery_p50_s)}` : "";
  $("workers").replaceChildren(workers(cluster.workers), element("p", note, "name"));
  $("placed").replaceChildren(placed(cluster.requests));
  $("prefixes").replaceChildren(prefixes(cluster.prefixes));
}
