"""Accuracy on problems that are not trained on: sets, votes, estimates."""
