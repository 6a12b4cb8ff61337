"""vitrail study cost: what a layer costs as the sequence grows, measured beside its O(·)."""


def cost() -> None:
    """Measure time and memory of ways to mix tokens as their number grows, and fit the exponents."""
