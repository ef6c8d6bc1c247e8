"""What a run will take, before anything is made: bytes, operations, seconds."""
