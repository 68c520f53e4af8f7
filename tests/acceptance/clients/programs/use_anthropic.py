"""Anthropic's client: messages, whole and streamed, counted tokens, and message batches."""

import json
import sys
import time

import anthropic

_, generate, *_ = sys.argv[1:]
client = anthropic.Anthropic(base_url=generate, api_key="none")
asked = {"model": "arithmetic", "max_tokens": 64, "messages": [{"role": "user", "content": "What is 2 plus 3?"}]}
message = client.messages.create(**asked)
with client.messages.stream(**asked) as stream:
    streamed = "".join(stream.text_stream)
    final = stream.get_final_message()
try:
    client.messages.create(**{**asked, "model": "other"})
except anthropic.NotFoundError as error:
    refused = str(error)
batch = client.messages.batches.create(requests=[{"custom_id": "one", "params": asked}])
while client.messages.batches.retrieve(batch.id).processing_status != "ended":
    time.sleep(0.1)
[result] = client.messages.batches.results(batch.id)
many = client.messages.batches.create(requests=[{"custom_id": f"r{n}", "params": asked} for n in range(300)])
print(
    json.dumps(
        {
            "answer": message.content[0].text,
            "streamed": streamed,
            "in_batch": result.result.message.content[0].text,
            "listed": {one.id for one in client.messages.batches.list()} == {batch.id, many.id},
            "canceled": client.messages.batches.cancel(many.id).processing_status,
            "final": final.content[0].text,
            "read": [final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)],
            "counted": [client.messages.count_tokens(model="arithmetic", messages=asked["messages"]).input_tokens],
            "reasons": [message.stop_reason, final.stop_reason],
            "refused": refused,
        }
    )
)
