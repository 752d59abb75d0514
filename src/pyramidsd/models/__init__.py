"""Models: one language model on one sequence behind `logits(context, n)`."""
