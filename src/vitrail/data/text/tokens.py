"""The special tokens of the tokenizers that we train. A loaded tokenizer has its own: read the ids from it."""

PAD, START, END, UNKNOWN = range(4)
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")  # by their ids
