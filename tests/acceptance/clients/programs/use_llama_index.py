"""LlamaIndex: embeddings and chats by OpenAI's API, embeddings by Text Embeddings Inference's, and Jina's reranker."""

import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.jinaai_rerank import JinaRerank

embed, generate, rank, *_ = sys.argv[1:]
texts = OpenAILikeEmbedding(model_name="all-MiniLM-L6-v2", api_base=f"{embed}/v1", api_key="none")
tei = TextEmbeddingsInference(model_name="all-MiniLM-L6-v2", base_url=embed)
model = {"model": "arithmetic", "api_base": f"{generate}/v1", "api_key": "none", "temperature": 0}  # else it samples
chat = OpenAILike(**model, is_chat_model=True)
plain = OpenAILike(**model)
question = [ChatMessage(role="user", content="What is 2 plus 3?")]
ranker = JinaRerank(api_key="none", base_url=rank, model="ranker", top_n=1)
nodes = [NodeWithScore(node=TextNode(text=text)) for text in ("a mill", "a canal")]
print(
    json.dumps(
        {
            "vectors": texts.get_text_embedding_batch(["a mill", "a canal"]),
            "tei": tei.get_text_embedding_batch(["a mill", "a canal"]),
            "answer": chat.chat(question).message.content,
            "streamed": "".join(part.delta for part in chat.stream_chat(question)),
            "completed": plain.complete("Q: 2+3\nA: ").text,
            "ranking": [
                ["a mill", "a canal"].index(found.node.text)
                for found in ranker.postprocess_nodes(nodes, query_str="canal")
            ],
        }
    )
)
