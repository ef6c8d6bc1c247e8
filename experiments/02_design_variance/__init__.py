"""Bias and variance of the gradient under each pruning rule."""
