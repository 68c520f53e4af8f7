// Hugging Face's client for Node.
import { InferenceClient } from "@huggingface/inference";

const [embed, generate, , , classify] = process.argv.slice(2);
const client = new InferenceClient();
const messages = [{ role: "user", content: "What is 2 plus 3?" }];
const chat = { endpointUrl: generate, messages };
let streamed = "";
for await (const part of client.chatCompletionStream(chat)) streamed += part.choices[0]?.delta.content ?? "";
const [label] = await client.textClassification({ endpointUrl: classify, inputs: "a mill" });
console.log(
  JSON.stringify({
    answer: (await client.chatCompletion(chat)).choices[0].message.content,
    streamed,
    completed: (await client.textGeneration({ endpointUrl: generate, inputs: "Q: 2+3\nA: " })).generated_text,
    vectors: await client.featureExtraction({ endpointUrl: embed, inputs: ["a mill", "a canal"] }),
    label: label.label,
  }),
);
