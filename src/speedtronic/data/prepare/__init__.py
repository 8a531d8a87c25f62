"""From text to token shards."""
