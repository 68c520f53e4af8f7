"""A causal language model made on the spot: right in every file and shape, with nothing learned."""

from __future__ import annotations

import string
import sys
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)


def save_random_llama(folder: Path, *, hidden: int = 128, layers: int = 2, context: int = 1024) -> Path:
    """Write it, with a tokenizer whose tokens are characters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *sorted(string.printable)]
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=context,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,  # large enough for one token to stand out: nearly equal ones would be chosen by rounding
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    save_random_llama(Path(sys.argv[1]), hidden=int(sys.argv[2]), layers=int(sys.argv[3]))
