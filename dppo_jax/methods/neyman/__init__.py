"""The Neyman method: rules, pass rates, budgets and what budgets read."""
