"""Looking at a model from outside: what it is made of, what it costs."""
