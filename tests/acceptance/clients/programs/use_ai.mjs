// Vercel's AI SDK, by its provider for OpenAI-compatible servers and by OpenAI's own.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, streamText } from "ai";

const [embed, generate] = process.argv.slice(2);
const prompt = "What is 2 plus 3?";
const chat = createOpenAICompatible({ name: "headrace", baseURL: `${generate}/v1` });
const texts = createOpenAICompatible({ name: "headrace", baseURL: `${embed}/v1` });
const openai = createOpenAI({ baseURL: `${generate}/v1`, apiKey: "none" });
let streamed = "";
for await (const part of streamText({ model: chat("arithmetic"), prompt }).textStream) streamed += part;
const { embeddings } = await embedMany({
  model: texts.textEmbeddingModel("all-MiniLM-L6-v2"),
  values: ["a mill", "a canal"],
});
console.log(
  JSON.stringify({
    vectors: embeddings,
    answer: (await generateText({ model: chat("arithmetic"), prompt })).text,
    answer_by_openai: (await generateText({ model: openai.chat("arithmetic"), prompt })).text,
    responded: (await generateText({ model: openai("arithmetic"), prompt })).text, // OpenAI's Responses API
    streamed,
  }),
);
