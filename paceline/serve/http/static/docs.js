"use strict";
// Renders the server's own OpenAPI description: routes, their fields, their answers.

function make(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter((t) => t !== "null").join(" | ");
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return `list of ${typeOf(schema.items || {})}`;
  return schema.type || "any";
}

function fields(api, schema) {
  const resolved = schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema;
  const table = make("table");
  for (const [name, field] of Object.entries(resolved.properties || {})) {
    const row = table.insertRow();
    const required = (resolved.required || []).includes(name) ? " (required)" : "";
    row.append(make("td", name + required), make("td", typeOf(field)), make("td", field.description || ""));
  }
  return table;
}

function route(api, path, method, about) {
  const box = make("section", undefined, "wide");
  box.append(make("h2", `${method.toUpperCase()} ${path}`), make("p", about.description || about.summary || ""));
  const body = about.requestBody && about.requestBody.content["application/json"];
  if (body) box.append(make("p", "Request", "name"), fields(api, body.schema));
  const answer = about.responses["200"].content && about.responses["200"].content["application/json"];
  if (answer && answer.schema && answer.schema.$ref) box.append(make("p", "Answer", "name"), fields(api, answer.schema));
  return box;
}

async function show() {
  const api = await (await fetch("openapi.json")).json();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, about] of Object.entries(methods)) document.getElementById("routes").append(route(api, path, method, about));
  }
}

show();
