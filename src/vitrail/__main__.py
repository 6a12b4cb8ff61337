"""`python -m vitrail`, and so `torchrun -m vitrail`."""

from vitrail.cli import main

main()
