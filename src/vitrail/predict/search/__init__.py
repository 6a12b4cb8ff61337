"""Search for a text: greedy, beam search, sampling."""
