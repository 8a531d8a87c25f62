"""A checkpoint for other programs: plain safetensors, or a Hugging Face folder."""
