"""From datasets and shards to batches whose position can be saved."""
