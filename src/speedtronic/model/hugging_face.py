"""Causal language models of Hugging Face's `transformers` by the folder they lie in, and LoRA adapters by `peft`.

`model.name: hf` builds what the folder's `config.json` describes. No code of a folder is run, and nothing is fetched.

With `model.lora` the folder's weights are frozen and adapters beside them are trained (Hu et al., arXiv 2106.09685).
The state of such a model is what is trained and nothing else, so that a checkpoint is small. It refers to the frozen
weights by the sums of their files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from speedtronic.config import ModelConfig
from speedtronic.config.checks import NO_HF_FOLDER
from speedtronic.config.sections import LoraConfig
from speedtronic.errors import CheckpointError, ConfigError, MissingExtraError

CONFIG, ADAPTERS = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_BASE = "_speedtronic_base"  # an attribute of a model with adapters: what `base_of` returns


def build_hugging_face_model(section: ModelConfig) -> nn.Module:
    """Build the model that the folder's `config.json` describes, in float32 and with random weights.

    With `section.lora` it has the folder's weights, frozen, and adapters that change nothing yet.

    Args:
        section: its `extra` replaces values of `config.json`.

    Raises:
        ConfigError: no folder is named, or what it describes cannot be built.
        CheckpointError: with `lora`, its weights cannot be read or are not those of the model.
        MissingExtraError: `transformers`, or `peft` with `lora`, is not installed.
    """
    if section.lora is not None:
        return _with_adapters(section, section.lora)
    transformers, config = _transformers(), configuration(section)
    with _building(folder_of(section)):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return _with_generation_config(model, folder_of(section))


def folder_of(section: ModelConfig) -> Path:
    """The folder of `model.hf_folder`.

    Raises:
        ConfigError: none is named, or it has no `config.json`, or has adapters in it.
    """
    if section.hf_folder is None:
        raise ConfigError(NO_HF_FOLDER)
    folder = Path(section.hf_folder)
    # Without this, transformers would take a path that is not there for the name of something to fetch.
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"model.hf_folder: {folder} has no {CONFIG}; name a folder that save_pretrained has written")
    # With these, transformers would read the weights of another place, which they name.
    if (folder / ADAPTERS).exists():
        raise ConfigError(
            f"model.hf_folder: {folder} has adapters in it ({ADAPTERS}); name the folder of their base, or merge them "
            "first: merge_and_unload of peft, then save_pretrained"
        )
    return folder


def configuration(section: ModelConfig) -> Any:
    """The folder's configuration, with the values of `section.extra` in it.

    Raises:
        ConfigError: it cannot be read, is not of a causal language model, or has no such values.
        MissingExtraError: `transformers` is not installed.
    """
    transformers, folder = _transformers(), folder_of(section)
    with _building(folder):
        config, unknown = transformers.AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, return_unused_kwargs=True, **section.extra
        )
    if unknown:
        listed = ", ".join(f"model.extra.{key}" for key in unknown)
        raise ConfigError(f"{listed}: the {config.model_type} of {folder / CONFIG} has no such value")
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        # The name of a kernel on a hub, which transformers would fetch and run.
        if "/" in str(getattr(part, "_attn_implementation", None)):
            raise ConfigError(
                f"model.hf_folder: {folder / CONFIG} asks for an attention kernel that would be fetched, "
                f"{part._attn_implementation}; remove its attn_implementation"
            )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"model.hf_folder: the weights in {folder} are quantised, and cannot be trained; name the folder of the "
            "model they were made of, with model.lora.base: 4bit where memory is short"
        )
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"model.hf_folder: transformers has no causal language model for a {config.model_type}, which "
            f"{folder / CONFIG} describes; register a model of your own by a plugin"
        )
    return config


def vocabulary_size(section: ModelConfig) -> int:
    """Rows of the embedding that the folder describes. Raises as `configuration`."""
    return int(configuration(section).get_text_config().vocab_size)


def load_pretrained(
    model: nn.Module, section: ModelConfig, folder: Path, *, strict: bool, warn: Callable[[str], None]
) -> int:
    """Copy the weights of a Hugging Face folder into a model that `build_hugging_face_model` built.

    `transformers` reads them, since it knows older names of tensors, and how they are joined in models of experts.

    Args:
        strict: whether every tensor must be there with its shape. Otherwise what fits is loaded.
        warn: told what did not fit if `strict` is false.

    Returns:
        The number of tensors that were loaded.

    Raises:
        CheckpointError: the weights cannot be read or are not those of the model.
    """
    source, unfit = _read(section, folder, torch.float32, strict=strict, warn=warn)
    weights = {name: tensor for name, tensor in source.state_dict().items() if name not in unfit}
    model.load_state_dict(weights, strict=False)
    return len(weights)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model was built with `model.lora`."""
    return hasattr(model, _BASE)


def base_of(model: nn.Module) -> dict[str, str] | None:
    """The SHA-256 of each file of the weights that the model's adapters were made for; None without adapters."""
    return cast("dict[str, str] | None", getattr(model, _BASE, None))


def check_base(model: nn.Module, saved: Mapping[str, str] | None) -> None:
    """Raise CheckpointError if the adapters of a checkpoint were trained beside other weights than the model has.

    Args:
        saved: what `base_of` returned of the model in the checkpoint; None where it had no adapters, which the names of
            its tensors tell too.
    """
    own = base_of(model)
    if own is None or saved is None or own == saved:
        return
    differing = sorted(name for name in own.keys() | saved.keys() if own.get(name) != saved.get(name))
    raise CheckpointError(
        f"the adapters of this checkpoint were trained beside other weights than model.hf_folder has "
        f"({', '.join(differing)}); set model.hf_folder to the folder that they were made for"
    )


def merged(model: nn.Module) -> nn.Module:
    """The model without adapters, whose weights have them in. The model itself cannot be used any more."""
    peft_model: Any = model
    return cast(nn.Module, peft_model.merge_and_unload())


# ---------------------------------------------------------------------- adapters


def _with_adapters(section: ModelConfig, lora: LoraConfig) -> nn.Module:
    peft, folder = _peft(), folder_of(section)
    dtype = torch.bfloat16 if lora.base == "bfloat16" else torch.float32
    base, _ = _read(section, folder, dtype, strict=True, warn=lambda message: None, four_bits=lora.base == "4bit")
    options = peft.LoraConfig(
        r=lora.r,
        lora_alpha=2 * lora.r if lora.alpha is None else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            # GPT-2's layers store their weights the other way round. peft finds that out, and says so.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")
            warnings.simplefilter("ignore", FutureWarning)  # of what peft itself uses of transformers
            model: nn.Module = peft.get_peft_model(base, options)
    except ValueError as error:
        layers = {name.rpartition(".")[2] for name, module in base.named_modules() if _is_linear(module)}
        raise ConfigError(
            f"model.lora.targets: {error}; the model's layers of this kind are {', '.join(sorted(layers))}"
        ) from error
    model.train()  # `from_pretrained` leaves the base in evaluation mode, without dropout and checkpointing
    setattr(model, _BASE, {name: _sum_of(folder / name) for name in _files_of_weights(folder)})
    model.register_state_dict_post_hook(_leave_out_the_base)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_post_hook(_miss_no_base)  # type: ignore[no-untyped-call]
    return model


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _files_of_weights(folder: Path) -> list[str]:
    """The files that `transformers` reads weights from; a folder may hold them in another form too."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    return sorted(set(index["weight_map"].values()))


def _sum_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _own_names(model: nn.Module) -> Iterator[str]:
    """The names of the adapters, and of what else is trained."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or any(part.startswith("lora_") for part in name.split(".")):
            yield name


def _leave_out_the_base(model: nn.Module, state: dict[str, Any], prefix: str, _: dict[str, Any]) -> None:
    """Take everything that is not trained out of a state, in place."""
    kept = {prefix + name for name in _own_names(model)}
    for name in [name for name in state if name.startswith(prefix) and name not in kept]:
        del state[name]


def _miss_no_base(model: nn.Module, incompatible: Any) -> None:
    """Take what a state need not have out of what it lacks, in place."""
    own = set(_own_names(model))
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in own]


# ---------------------------------------------------------------------- reading


def _read(
    section: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    *,
    strict: bool,
    warn: Callable[[str], None],
    four_bits: bool = False,
) -> tuple[nn.Module, set[str]]:
    """The model of a folder with its weights, and the names of the tensors that it had none for."""
    transformers, config = _transformers(), configuration(section)
    options: dict[str, Any] = {"quantization_config": _four_bits()} if four_bits else {}
    try:
        with _quiet(transformers):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,  # other files are pickles, which can run code
                trust_remote_code=False,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: its weights cannot be read: {error}") from error
    shapes = {name: (theirs, ours) for name, theirs, ours in report["mismatched_keys"]}
    problems = [f"{name} is missing there" for name in sorted(report["missing_keys"] - shapes.keys())]
    problems += [f"{name} is not in this model" for name in sorted(report["unexpected_keys"])]
    problems += [
        f"{name} has shape {tuple(theirs)} there and {tuple(ours)} in this model"
        for name, (theirs, ours) in sorted(shapes.items())
    ]
    problems += report["error_msgs"]
    if problems:
        listed = "\n  ".join(problems)
        if strict:
            raise CheckpointError(
                f"{folder}: these weights are not those of this model:\n  {listed}\n"
                "Set run.init_strict: false to load what fits"
            )
        warn(f"{folder}: not all of these weights are those of this model; the rest is loaded:\n  {listed}")
    return _with_generation_config(model, folder), report["missing_keys"] | shapes.keys()


def _with_generation_config(model: Any, folder: Path) -> nn.Module:
    """The model with the folder's way to write, which an export writes again."""
    if (folder / "generation_config.json").is_file():
        model.generation_config = _transformers().GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return cast(nn.Module, model)


@contextmanager
def _building(folder: Path) -> Iterator[None]:
    """Turn what `transformers` says of a folder that it cannot use into a ConfigError."""
    try:
        yield
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.hf_folder: {folder} cannot be used: {error}") from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the progress bar and the report of `transformers`: what it reports is looked at here."""
    bar, verbosity = transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bar:
            transformers.logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("model.name: hf needs transformers; install speedtronic[transformers]") from error
    return transformers


def _four_bits() -> Any:
    """How a frozen base is kept in 4 bits: NF4 with quantised constants (Dettmers et al., arXiv 2305.14314)."""
    try:
        import bitsandbytes  # noqa: F401 - transformers uses it
    except ImportError as error:
        raise MissingExtraError(
            "model.lora.base: 4bit needs bitsandbytes; install speedtronic[bitsandbytes]"
        ) from error
    return _transformers().BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )


def _peft() -> Any:
    try:
        # It imports bitsandbytes where that is installed, which on some CPUs says that it has not fetched a kernel.
        logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
        import peft
    except ImportError as error:
        raise MissingExtraError("model.lora needs peft; install speedtronic[peft]") from error
    return peft
