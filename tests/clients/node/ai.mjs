// Vercel's AI SDK: node ai.mjs BASE_URL MODEL. Prints what came back as one line of JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const compatible = createOpenAICompatible({ name: "paceline", baseURL, supportsStructuredOutputs: true })(name);
const responses = createOpenAI({ baseURL, apiKey: "none" }).responses(name);
const Trip = z.object({ start: z.string().max(12), passengers: z.number().int().min(0).max(999), by: z.enum(["train", "bus"]) });
const weather = tool({
  description: "Tells the weather", inputSchema: z.object({ city: z.string().max(12), unit: z.enum(["celsius", "fahrenheit"]) }),
});
const common = { prompt: "A train leaves Oslo for Bergen with 120 passengers.", temperature: 0, maxOutputTokens: 300, maxRetries: 0 };

async function tried(model) {
  const trip = (await generateText({ ...common, model, output: Output.object({ schema: Trip }) })).output;
  const choice = { type: "tool", toolName: "weather" };
  const whole = await generateText({ ...common, model, tools: { weather }, toolChoice: choice });
  const stream = streamText({ ...common, model, tools: { weather }, toolChoice: choice });
  let deltas = "";
  for await (const part of stream.fullStream) {
    if (part.type === "tool-input-delta") deltas += part.delta;
    if (part.type === "error") throw part.error;
  }
  return { trip: Trip.parse(trip), finish: whole.finishReason, input: whole.toolCalls[0].input, deltas };
}

console.log(JSON.stringify({ chat: await tried(compatible), responses: await tried(responses) }));
