"""A character tokenizer for arithmetic, built in memory."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
ALPHABET = "0123456789+-= *,"


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of `ALPHABET`, after padding (0) and end (1); others are refused as unknown padding."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD, clean_up_tokenization_spaces=False
    )
