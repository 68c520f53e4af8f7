// Cohere's client for Node.
import { CohereClientV2 } from "cohere-ai";

const [embed, generate, rank] = process.argv.slice(2);
const [texts, chat, ranker] = [embed, generate, rank].map(
  (environment) => new CohereClientV2({ token: "none", environment }),
);
const asked = { model: "arithmetic", messages: [{ role: "user", content: "What is 2 plus 3?" }] };
const found = await texts.embed({
  model: "all-MiniLM-L6-v2",
  texts: ["a mill", "a canal"],
  inputType: "search_document",
  embeddingTypes: ["float"],
});
const ranked = await ranker.rerank({ model: "ranker", query: "canal", documents: ["a mill", "a canal"], topN: 1 });
console.log(
  JSON.stringify({
    answer: (await chat.chat(asked)).message.content[0].text,
    vectors: found.embeddings.float,
    ranking: ranked.results.map((one) => one.index),
  }),
);
