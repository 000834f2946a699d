"""Tiny word tokenizers whose every id can be written down by hand."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("<s>", "</s>", "<unk>", "user", "assistant", "system", ":", "a", "b", "c", "d", "e")
"""Word number i has id i: BOS 0, EOS 1, unknown 2, roles 3 to 5, colon 6, a to e 7 to 11."""

PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"


def make_tokenizer(
    *,
    adds_bos: bool = True,
    adds_eos: bool = False,
    bos: str | None = "<s>",
    template: str | None = None,
) -> Any:
    """Build a tokenizer that splits at spaces; its context is 4 tokens, to provoke warnings."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  a word, not a password
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = f"{'<s>' if adds_bos else ''} $A {'</s>' if adds_eos else ''}"
    backend.post_processor = processors.TemplateProcessing(
        single=wrapped.strip(), special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token="</s>",  # noqa: S106  a word, not a password
        unk_token="<unk>",  # noqa: S106  a word, not a password
        model_max_length=4,
    )
    tokenizer.chat_template = template
    return tokenizer
