from __future__ import annotations

import pytest
import torch
from torch import nn

from speedtronic.distributed.schema import Schema, Tensors, rebase_, snapshot
from tests.support.exchanged import TRAINED, Compiled, Everything, assert_equal, everything, types_of


class TestSchema:
    def test_each_tensor_is_listed_once_under_its_kind(self) -> None:
        schema = Schema.of(everything())

        assert set(schema.names("trained")) == set(TRAINED)
        assert schema.names("frozen") == ("frozen",)
        assert schema.names("average") == ("mask", "empty", "norm.running_mean", "norm.running_var")
        assert schema.names("newest") == ("flags", "norm.num_batches_tracked")
        assert set(schema.names()) == set(schema.names("trained", "frozen", "average", "newest"))

    def test_the_dtypes_are_those_of_the_exchange(self) -> None:
        model = everything().bfloat16()

        dtypes = {name: form.dtype for name, form in Schema.of(model).types().items()}

        assert dtypes["first.weight"] == dtypes["norm.running_var"] == torch.float32
        assert dtypes["phase"] == torch.complex64
        assert dtypes["flags"] == torch.bool
        assert dtypes["norm.num_batches_tracked"] == torch.int64

    def test_a_compiled_model_has_the_names_of_the_plain_one(self) -> None:
        inside = nn.Sequential(Compiled(nn.Linear(2, 2)), Compiled(nn.BatchNorm1d(1, affine=False)))

        names = Schema.of(Compiled(inside)).names()

        assert names == ("0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked")

    def test_two_precisions_of_one_model_have_one_fingerprint(self) -> None:
        assert Schema.of(nn.Linear(3, 4)).fingerprint == Schema.of(nn.Linear(3, 4).double()).fingerprint

    def test_the_fingerprint_ignores_the_order(self) -> None:
        schema = Schema.of(everything())

        assert Schema(dict(reversed(schema.entries.items()))).fingerprint == schema.fingerprint

    def test_a_name_a_shape_a_kind_or_a_dtype_changes_the_fingerprint(self) -> None:
        frozen, narrow = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        frozen.bias.requires_grad_(False)
        assert narrow.num_batches_tracked is not None
        narrow.num_batches_tracked = narrow.num_batches_tracked.to(torch.int32)
        models = [nn.BatchNorm1d(4), nn.BatchNorm1d(5), nn.Sequential(nn.BatchNorm1d(4)), frozen, narrow]

        assert len({Schema.of(model).fingerprint for model in models}) == len(models)

    def test_a_shared_buffer_is_listed_once(self) -> None:
        model = nn.Sequential(nn.Identity(), nn.Identity())
        for module in model:
            module.register_buffer("table", torch.ones(2) if not dict(model.named_buffers()) else model[0].table)

        assert Schema.of(model).names() == ("0.table",)

    def test_a_tensor_that_cannot_be_exchanged_is_named(self) -> None:
        sparse = nn.Module()
        sparse.register_buffer("graph", torch.eye(2).to_sparse())
        models = {"weight": nn.LazyLinear(2), "graph": sparse, "bias": nn.Linear(2, 2, device="meta")}

        for name, model in models.items():
            with pytest.raises(ValueError, match=name if name != "bias" else "weight"):
                Schema.of(model)


class TestSnapshot:
    def test_a_snapshot_has_the_types_of_the_schema(self) -> None:
        for model in (everything(), everything().half(), everything().double()):
            assert types_of(snapshot(model)) == Schema.of(model).types()

    def test_training_does_not_change_a_snapshot(self) -> None:
        model = everything()
        before = snapshot(model)
        bias = before["first.bias"].clone()

        with torch.no_grad():
            model.first.bias += 1

        assert torch.equal(before["first.bias"], bias)

    def test_the_memory_of_a_snapshot_is_reused(self) -> None:
        model = everything()
        first = snapshot(model, names=TRAINED)
        places = {name: tensor.data_ptr() for name, tensor in first.items()}
        with torch.no_grad():
            model.phase += 1j

        second = snapshot(model, first, names=TRAINED)

        assert second is first
        assert {name: tensor.data_ptr() for name, tensor in second.items()} == places
        assert torch.equal(second["phase"], model.phase.detach())

    def test_a_snapshot_may_have_some_names_only(self) -> None:
        assert snapshot(everything(), names=["flags", "phase"]).keys() == {"flags", "phase"}


class TestRebase:
    @staticmethod
    def trained(model: Everything) -> Tensors:
        return snapshot(model, names=TRAINED)

    def test_without_progress_the_model_is_the_new_base_exactly(self) -> None:
        model, other = everything(0), everything(1)
        new_base = snapshot(other)

        rebase_(model, new_base, self.trained(model), adopt=False)

        assert_equal(snapshot(model), snapshot(other))

    def test_progress_since_the_old_base_is_kept(self) -> None:
        model, new_base = everything(0), snapshot(everything(1))
        base = self.trained(model)
        learnt = {name: torch.full_like(tensor, 0.25) for name, tensor in base.items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in learnt:
                    parameter.add_(learnt[name])

        rebase_(model, new_base, base, adopt=False)

        for name, value in self.trained(model).items():
            assert torch.allclose(value, new_base[name] + learnt[name], rtol=0, atol=1e-6)

    def test_adopting_drops_local_progress(self) -> None:
        model, new_base = everything(0), snapshot(everything(1))
        base = self.trained(model)
        with torch.no_grad():
            model.first.weight += 1

        rebase_(model, new_base, base, adopt=True)

        assert_equal(snapshot(model), new_base)

    def test_what_is_not_in_the_base_is_overwritten(self) -> None:
        model = everything()
        new_base = snapshot(model)
        new_base["frozen"] = torch.tensor([7.0, 8.0, 9.0])
        new_base["norm.running_mean"] = torch.ones(4)
        new_base["norm.num_batches_tracked"] = torch.tensor(12)
        new_base["flags"] = torch.tensor([False, True])
        expected = {name: tensor.clone() for name, tensor in new_base.items()}

        rebase_(model, new_base, self.trained(model), adopt=False)

        assert_equal(snapshot(model), expected)

    def test_a_parameter_that_is_frozen_for_a_while_keeps_its_progress(self) -> None:
        model, new_base = everything(0), snapshot(everything(1))
        base = self.trained(model)
        with torch.no_grad():
            model.first.bias += 0.5
        model.first.bias.requires_grad_(False)

        rebase_(model, new_base, base, adopt=False)

        assert torch.allclose(model.first.bias, new_base["first.bias"] + 0.5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_in_half_precision_rounding_does_not_count_as_progress(self, dtype: torch.dtype) -> None:
        model, new_base = nn.Linear(5, 5).to(dtype), snapshot(nn.Linear(5, 5))
        given = dict(new_base)
        values = {name: tensor.clone() for name, tensor in new_base.items()}

        rebase_(model, new_base, snapshot(model), adopt=False)

        assert_equal(snapshot(model), new_base)
        assert_equal(new_base, {name: tensor.to(dtype).float() for name, tensor in values.items()})
        assert_equal(given, values)  # entries are replaced; tensors that others may hold stay as they are

    def test_in_double_precision_no_bit_of_progress_is_lost(self) -> None:
        model = nn.Linear(1, 1, bias=False).double()
        base = {"weight": torch.tensor([[1.0]])}
        with torch.no_grad():
            model.weight.fill_(1.0 + 2.0**-40)

        rebase_(model, {"weight": torch.tensor([[2.0]])}, base, adopt=False)

        assert model.weight.item() == 2.0 + 2.0**-40

    def test_a_base_of_another_shape_changes_nothing(self) -> None:
        model = everything()
        before = snapshot(model)
        lacking = snapshot(everything(1))
        del lacking["flags"]
        misshapen = {**snapshot(everything(1)), "flags": torch.zeros(5, dtype=torch.bool)}

        for new_base in (lacking, misshapen):
            with pytest.raises(ValueError, match="flags"):
                rebase_(model, new_base, self.trained(model), adopt=False)

        assert_equal(snapshot(model), before)


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshot_and_rebase_on_a_gpu_equal_those_on_the_cpu(dtype: torch.dtype) -> None:
    here, there = nn.Linear(64, 48).to(dtype), nn.Linear(64, 48).to(dtype).cuda()
    there.load_state_dict(here.state_dict())
    base = snapshot(here)
    assert_equal(snapshot(there), base)
    reused = snapshot(there)
    for model in (here, there):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
    assert snapshot(there, reused) is reused
    assert_equal(reused, snapshot(here))
    new_base = {name: value + 0.25 for name, value in base.items()}
    on_device = dict(new_base)
    rebase_(here, new_base, base, adopt=False)
    rebase_(there, on_device, base, adopt=False)
    assert_equal(on_device, new_base)
    assert_equal(snapshot(there), snapshot(here))
