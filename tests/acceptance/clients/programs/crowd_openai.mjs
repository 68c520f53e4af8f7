// OpenAI's client for Node, several callers at once: the address, how many, and the texts and words of each.
import OpenAI from "openai";

const [url, ...numbers] = process.argv.slice(2);
const [callers, texts, words] = numbers.map(Number);
const ask = async (number) => {
  const input = Array.from({ length: texts }, (_, place) => `${number} ${place} ` + "word ".repeat(words - 2));
  try {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
    const found = await client.embeddings.create({ model: "m", input });
    return found.data.length === texts ? "answered" : `${found.data.length} vectors`;
  } catch (error) {
    return `${error.constructor.name}: ${error.message}`;
  }
};
console.log(JSON.stringify(await Promise.all(Array.from({ length: callers }, (_, number) => ask(number)))));
