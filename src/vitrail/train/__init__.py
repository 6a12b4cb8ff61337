"""One loop that trains any model, what it is told, what it writes down, and how well the result answers."""
