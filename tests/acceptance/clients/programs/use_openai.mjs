// OpenAI's client for Node.
import OpenAI from "openai";

const [embed, generate] = process.argv.slice(2);
const messages = [{ role: "user", content: "What is 2 plus 3?" }];
const texts = new OpenAI({ baseURL: `${embed}/v1`, apiKey: "none" });
const chat = new OpenAI({ baseURL: `${generate}/v1`, apiKey: "none" });
const found = await texts.embeddings.create({ model: "all-MiniLM-L6-v2", input: ["a mill", "a canal"] });
const whole = await chat.chat.completions.create({ model: "arithmetic", messages });
let streamed = "";
for await (const chunk of await chat.chat.completions.create({ model: "arithmetic", messages, stream: true })) {
  streamed += chunk.choices[0].delta.content ?? "";
}
console.log(
  JSON.stringify({
    vectors: found.data.map((entry) => entry.embedding),
    answer: whole.choices[0].message.content,
    streamed,
  }),
);
