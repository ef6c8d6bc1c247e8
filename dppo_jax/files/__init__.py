"""Files that people write or edit, and directories in buckets."""
