"""The mathematics: pure functions of arrays; no model, config, or file."""
