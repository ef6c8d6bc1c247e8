"""Files that people write or edit."""
