"""Which parameters go to Muon and which to AdamW: names, roles, ties, splits, and models of libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from speedtronic.model import ReferenceTransformer
from speedtronic.optimizers.routing import ParameterRouting, route_parameters
from tests.support.cases import case
from tests.support.foreign import tiny_model


def names(parameters: tuple[tuple[str, nn.Parameter], ...]) -> list[str]:
    return [name for name, _ in parameters]


def muon(model: nn.Module) -> list[str]:
    return names(route_parameters(model).muon)


def adamw(model: nn.Module) -> list[str]:
    return names(route_parameters(model).adamw)


def with_role(module: nn.Module, role: object) -> Any:
    module._speedtronic_optimizer_role = role  # type: ignore[assignment]
    return module


def with_split(module: nn.Module, *rows: object) -> Any:
    module._speedtronic_muon_split = rows  # type: ignore[assignment]
    return module


class Named(nn.Module):
    """Modules under the names given."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


# ---------------------------------------------------------------- models


def test_the_one_layer_reference_model_routes_seven_to_muon_and_four_to_adamw() -> None:
    model = ReferenceTransformer(vocab_size=32, block_size=8, n_layer=1, n_head=2, d_model=8)
    routing = route_parameters(model)
    block = "transformer.h.0"
    assert names(routing.muon) == [
        *(f"{block}.attn.{name}_proj.weight" for name in ("q", "k", "v", "out")),
        *(f"{block}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    ]
    assert names(routing.adamw) == [
        "transformer.wte.weight",
        f"{block}.attn_norm.weight",
        f"{block}.mlp_norm.weight",
        "transformer.norm.weight",
    ]
    assert routing.skipped == ()
    assert routing.splits == {}


def test_adamw_gets_an_untied_head_of_the_reference_model() -> None:
    model = ReferenceTransformer(vocab_size=32, block_size=8, n_layer=1, n_head=2, d_model=8, tie_weights=False)
    assert "lm_head.weight" in adamw(model)
    assert len(muon(model)) == 7


def test_hugging_faces_llama_routes_like_the_reference_model() -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_model(transformers, "llama")
    assert len(muon(model)) == 2 * 7
    assert adamw(model) == [
        "model.embed_tokens.weight",
        *(
            f"model.layers.{n}.{norm}.weight"
            for n in (0, 1)
            for norm in ("input_layernorm", "post_attention_layernorm")
        ),
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_adamw_gets_all_of_hugging_faces_gpt2_whose_only_linear_is_its_head() -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_model(transformers, "gpt2")
    assert muon(model) == []
    assert len(adamw(model)) == len(list(model.parameters()))


def test_hugging_faces_bert_has_hidden_inner_outputs_and_a_tied_head() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = transformers.BertForMaskedLM(config)
    assert "bert.encoder.layer.0.output.dense.weight" in muon(model)
    assert "bert.encoder.layer.0.attention.output.dense.weight" in muon(model)
    assert "bert.embeddings.word_embeddings.weight" in adamw(model)
    assert not [name for name in muon(model) if "decoder" in name or "embeddings" in name]


def test_adamw_gets_the_fused_projection_of_torchs_attention_and_muon_gets_its_linears() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert muon(model) == ["self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert "self_attn.in_proj_weight" in adamw(model)


def test_adamw_gets_convolutions_and_norms() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2))
    assert muon(model) == ["3.weight", "4.weight"]
    assert adamw(model) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.bias", "4.bias"]


def test_in_a_model_without_names_every_linear_is_hidden() -> None:
    assert muon(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))) == ["0.weight", "2.weight"]
    assert muon(nn.Linear(2, 3)) == ["weight"]


# ---------------------------------------------------------------- names


def test_adamw_gets_a_linear_that_is_named_like_an_embedding_or_a_head() -> None:
    for name in (
        *("embed", "embedding", "wte", "wpe", "lm_head", "classifier", "output", "output_proj"),
        *("score", "score_proj", "head", "LM_Head", "Classifier"),
    ):
        with case(name):
            assert muon(Named(**{name: nn.Linear(2, 3), "body": Named(**{name: nn.Linear(2, 3)})})) == []


def test_a_name_must_match_the_list_as_a_whole() -> None:
    for name in ("output_gate", "heads", "embed_mlp", "my_head", "scores", "out", "fc"):
        with case(name):
            assert muon(Named(**{name: nn.Linear(2, 3)})) == [f"{name}.weight"]


def test_a_number_after_a_name_does_not_hide_it_but_another_name_does() -> None:
    model = Named(
        classifier=nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)),
        head=nn.ModuleList([nn.Sequential(nn.Linear(2, 3))]),
        output=nn.Sequential(Named(dense=nn.Linear(2, 3))),
    )
    assert muon(model) == ["output.0.dense.weight"]


def test_a_compiled_model_routes_like_the_plain_one() -> None:
    model = Named(head=nn.Linear(2, 3), body=nn.Linear(2, 2))
    assert muon(torch.compile(model, backend="eager")) == ["_orig_mod.body.weight"]


# ---------------------------------------------------------------- ties, frozen ones, matrices of one's own


def test_adamw_gets_a_weight_that_is_tied_to_an_embedding_for_any_name_of_the_head() -> None:
    model = Named(decoder=nn.Linear(4, 7, bias=False), tokens=nn.Embedding(7, 4))
    model.decoder.weight = model.tokens.weight
    assert names(route_parameters(model).adamw) == ["decoder.weight"]
    assert muon(model) == []


def test_muon_gets_a_hidden_matrix_that_two_layers_share_once() -> None:
    shared = nn.Linear(4, 4)
    assert muon(nn.Sequential(shared, nn.ReLU(), shared)) == ["0.weight"]
    model = Named(first=nn.Linear(4, 4), second=nn.Linear(4, 4), head=nn.Linear(4, 4))
    model.second.weight = model.first.weight
    assert muon(model) == ["first.weight"]
    model.head.weight = model.first.weight
    assert muon(model) == []


def test_frozen_parameters_are_skipped_and_nothing_else_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    routing = route_parameters(model)
    assert names(routing.skipped) == ["0.weight", "0.bias"]
    assert (names(routing.muon), names(routing.adamw)) == (["1.weight"], ["1.bias"])


def test_each_parameter_is_routed_once_in_the_models_order() -> None:
    model = ReferenceTransformer(vocab_size=32, block_size=8, n_layer=2, n_head=2, d_model=8)
    model.blocks[0].requires_grad_(False)
    routing = route_parameters(model)
    order = [name for name, _ in model.named_parameters()]
    own = dict(model.named_parameters())
    seen = [*routing.muon, *routing.adamw, *routing.skipped]
    assert sorted(name for name, _ in seen) == sorted(order)
    assert all(own[name] is parameter for name, parameter in seen)
    for part in (routing.muon, routing.adamw, routing.skipped):
        assert names(part) == [name for name in order if name in names(part)]


def test_adamw_gets_a_bare_matrix_of_a_module() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3, 3))

    assert (muon(Mixing()), adamw(Mixing())) == ([], ["weight"])


def test_adamw_gets_a_complex_linear() -> None:
    assert muon(nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 2))) == ["1.weight"]


# ---------------------------------------------------------------- roles


def test_a_role_overrides_the_name_and_the_kind_of_module() -> None:
    model = Named(
        head=with_role(nn.Linear(2, 3), "muon"),
        body=with_role(nn.Linear(2, 2), "adamw"),
        table=with_role(nn.Embedding(4, 2), "muon"),
        attention=with_role(nn.MultiheadAttention(2, 1), "muon"),
    )
    assert muon(model) == [
        "head.weight",
        "table.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    ]


def test_a_role_holds_for_all_modules_inside_and_the_innermost_counts() -> None:
    inner = with_role(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "muon")
    model = with_role(Named(first=nn.Linear(2, 2), inner=inner), "adamw")
    assert muon(model) == ["inner.0.weight"]
    assert adamw(model) == ["first.weight", "first.bias", "inner.0.bias", "inner.1.weight", "inner.1.bias"]


def test_with_the_role_muon_adamw_still_gets_parameters_that_are_not_floating_matrices() -> None:
    model = with_role(nn.Sequential(nn.Conv1d(2, 2, 3), nn.Linear(2, 2, dtype=torch.complex64)), "muon")
    assert muon(model) == []
    assert len(adamw(model)) == 4


def test_a_class_may_declare_a_role() -> None:
    class Expert(nn.Linear):
        _speedtronic_optimizer_role = "adamw"

    assert muon(nn.Sequential(Expert(2, 2), nn.Linear(2, 2))) == ["1.weight"]


def test_a_role_of_a_tied_weight_counts_at_any_of_its_places() -> None:
    model = Named(tokens=nn.Embedding(7, 4), decoder=with_role(nn.Linear(4, 7, bias=False), "muon"))
    model.decoder.weight = model.tokens.weight
    assert muon(model) == ["tokens.weight"]
    with_role(model.tokens, "adamw")
    assert muon(model) == []


def test_an_unknown_role_is_an_error_that_names_module_and_value() -> None:
    for role in ("sgd", "Muon", "", None, 1, ["muon"]):
        with case(role):
            model = Named(blocks=nn.Sequential(with_role(nn.Linear(2, 2), role)))
            with pytest.raises(ValueError, match=r"module 'blocks\.0': _speedtronic_optimizer_role is ") as caught:
                route_parameters(model)
            assert repr(role) in str(caught.value)


def test_a_wrong_role_of_the_model_itself_names_its_class() -> None:
    with pytest.raises(ValueError, match="the model, a Linear: _speedtronic_optimizer_role is 'sgd'"):
        route_parameters(with_role(nn.Linear(2, 2), "sgd"))


# ---------------------------------------------------------------- splits


def test_a_fused_weight_declares_its_pieces() -> None:
    model = Named(qkv=with_split(nn.Linear(4, 8), 4, 2, 2), up=nn.Linear(4, 8), head=with_split(nn.Linear(4, 2), 1, 1))
    assert route_parameters(model).splits == {"qkv.weight": (4, 2, 2)}


def test_a_split_that_does_not_fit_its_weight_is_an_error_that_names_both() -> None:
    for split in ((4, 2), (4, 4, 4), (8, 0), (9, -1), (4.0, 4.0)):
        wrong = r"module 'qkv': _speedtronic_muon_split is \(.*sum to the 8 rows"
        with case(split), pytest.raises(ValueError, match=wrong):
            route_parameters(Named(qkv=with_split(nn.Linear(4, 8), *split)))


def test_a_routing_has_no_splits_unless_given() -> None:
    assert ParameterRouting((), (), ()).splits == {}
