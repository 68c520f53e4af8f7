// Ollama's client for Node.
import { Ollama } from "ollama";

const [embed, generate] = process.argv.slice(2);
const chat = new Ollama({ host: generate });
const asked = { model: "arithmetic", messages: [{ role: "user", content: "What is 2 plus 3?" }] };
let streamed = "";
for await (const part of await chat.chat({ ...asked, stream: true })) streamed += part.message.content;
const found = await new Ollama({ host: embed }).embed({ model: "all-MiniLM-L6-v2", input: ["a mill", "a canal"] });
console.log(
  JSON.stringify({ answer: (await chat.chat(asked)).message.content, streamed, vectors: found.embeddings }),
);
