"""Text data: pairs of sentences, tokenizers, and batches of tokens."""
