"""Accuracy on held-out problems: sets, estimators and the results page."""
