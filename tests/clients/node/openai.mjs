// The official client: node openai.mjs BASE_URL MODEL. Prints what came back as one line of JSON.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const Trip = z.object({ start: z.string().max(12), passengers: z.number().int().min(0).max(999), by: z.enum(["train", "bus"]) });
const messages = [{ role: "user", content: "A train leaves Oslo for Bergen with 120 passengers." }];
const greedy = { model, temperature: 0, max_completion_tokens: 300 };
const parameters = {
  type: "object", additionalProperties: false, required: ["city", "unit"],
  properties: { city: { type: "string", maxLength: 12 }, unit: { enum: ["celsius", "fahrenheit"] } },
};

const parsed = await client.chat.completions.parse({ ...greedy, messages, response_format: zodResponseFormat(Trip, "trip") });
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const stream = client.chat.completions.stream({ ...greedy, messages, tools, tool_choice: "required", parallel_tool_calls: false });
let deltas = "";
stream.on("tool_calls.function.arguments.delta", (event) => { deltas += event.arguments_delta; });
const final = await stream.finalChatCompletion();

const events = await client.responses.create({
  model, temperature: 0, max_output_tokens: 300, input: messages[0].content, stream: true,
  tools: [{ type: "function", name: "weather", parameters, strict: true }], tool_choice: { type: "function", name: "weather" },
});
const types = [];
let response = null, told = "";
for await (const event of events) {
  types.push(event.type);
  if (event.type === "response.function_call_arguments.delta") told += event.delta;
  if (event.type === "response.completed") response = event.response;
}
console.log(JSON.stringify({
  trip: Trip.parse(parsed.choices[0].message.parsed), finish: final.choices[0].finish_reason, deltas,
  call: final.choices[0].message.tool_calls[0].function, types, told, output: response.output,
}));
