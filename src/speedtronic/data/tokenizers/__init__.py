"""From text to token ids and back: bytes, characters, and tokenizer files."""
