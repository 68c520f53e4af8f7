// LangChain for Node.
import { ChatOpenAI, OpenAIEmbeddings } from "@langchain/openai";

const [embed, generate] = process.argv.slice(2);
const chat = new ChatOpenAI({ model: "arithmetic", apiKey: "none", configuration: { baseURL: `${generate}/v1` } });
const texts = new OpenAIEmbeddings({ apiKey: "none", configuration: { baseURL: `${embed}/v1` } });
let streamed = "";
for await (const part of await chat.stream("What is 2 plus 3?")) streamed += part.content;
console.log(
  JSON.stringify({
    answer: (await chat.invoke("What is 2 plus 3?")).content,
    streamed,
    vectors: await texts.embedDocuments(["a mill", "a canal"]),
  }),
);
