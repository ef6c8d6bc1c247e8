"""Networks and their checkpoints."""
