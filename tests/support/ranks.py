"""GPT-2's published BPE ranks, which `make` takes out of the sdist of openai-whisper."""

from __future__ import annotations

from pathlib import Path

import pytest

GPT2_RANKS = Path(__file__).parents[2] / "build/test-data/gpt2.tiktoken"

needs_gpt2_ranks = pytest.mark.skipif(not GPT2_RANKS.is_file(), reason=f"{GPT2_RANKS} is made by `make`")
