"""Memory and programs of a run, on devices that need not be present."""
