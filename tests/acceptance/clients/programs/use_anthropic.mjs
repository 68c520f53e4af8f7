// Anthropic's client for Node.
import Anthropic from "@anthropic-ai/sdk";

const [, generate] = process.argv.slice(2);
const client = new Anthropic({ baseURL: generate, apiKey: "none" });
const asked = { model: "arithmetic", max_tokens: 64, messages: [{ role: "user", content: "What is 2 plus 3?" }] };
let streamed = "";
const stream = client.messages.stream(asked).on("text", (text) => (streamed += text));
await stream.finalMessage();
console.log(JSON.stringify({ answer: (await client.messages.create(asked)).content[0].text, streamed }));
