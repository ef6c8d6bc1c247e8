"""Group-based policy optimisation of language models, with unbiased pruning."""
