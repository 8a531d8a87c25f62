"""A model from a library: a Llama of Hugging Face's `transformers`, built from its sizes, without a download.

Its `forward` passes further keywords on to a loss. The trainer finds that out and gives it the aligned labels as
`shift_labels`, so that the model does not shift them a second time.
"""

from transformers import LlamaConfig, LlamaForCausalLM

from speedtronic import ModelConfig, register_model


@register_model("llama")
def llama(config: ModelConfig, **options: object) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            max_position_embeddings=config.max_seq_len,
            tie_word_embeddings=config.tie_weights,
            **options,
        )
    )
