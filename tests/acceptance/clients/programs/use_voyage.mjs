// Voyage's client for Node.
import { VoyageAIClient } from "voyageai";

const [embed, , rank] = process.argv.slice(2);
const [texts, ranker] = [embed, rank].map((url) => new VoyageAIClient({ apiKey: "none", environment: `${url}/v1` }));
const found = await texts.embed({ model: "all-MiniLM-L6-v2", input: ["a mill", "a canal"] });
const ranked = await ranker.rerank({ model: "ranker", query: "canal", documents: ["a mill", "a canal"], topK: 1 });
console.log(
  JSON.stringify({
    vectors: found.data.map((one) => one.embedding),
    ranking: ranked.data.map((one) => one.index),
  }),
);
