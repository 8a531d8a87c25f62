"""The sections of a configuration: keys, types, bounds, defaults and what each key means."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    SecretStr,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)

from speedtronic.config.base import AutoSize, Section
from speedtronic.config.problems import in_words, is_unicode
from speedtronic.config.secrets import REDACTED, without_redacted

# --- types of values ---

_DEEPEST = 32  # most levels in a mapping of free keys


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _in_capitals(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _writable(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not contain a NUL character")
    if not is_unicode(value):
        raise ValueError(f"must be valid Unicode text, not {in_words(value)}")
    return value


def _none_or(value: object, check: Any) -> Any:
    return None if value is None else check(value)


def _auto_or(value: object, check: Any) -> Any:
    return AutoSize() if value == "auto" or isinstance(value, AutoSize) else check(value)


def _not_redacted(value: object) -> object:
    return None if value == REDACTED else value


def _check_match(pattern: str, wanted: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must be {wanted}, not {in_words(value)}")
        return value

    return AfterValidator(check)


def _schema_match(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": f"^({pattern})$"})


def _plain_mapping(value: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = without_redacted(_plain_value(value, "", 0))
    return plain


def _plain_value(value: object, place: str, depth: int) -> Any:
    if isinstance(value, str) and not is_unicode(value):
        raise ValueError(f"the text{place} must be valid Unicode text")
    if depth > _DEEPEST:
        raise ValueError(f"must not be nested more than {_DEEPEST} levels deep")
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"keys{place} must be text, not {in_words(wrong[0])}")
        return {key: _plain_value(item, f" under {key!r}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item, place, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the number{place} must be finite")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"the value{place} must be text, a number, true, false, null, a list or a mapping")


def _alignment(value: object) -> object:
    if value in ("auto", "none") or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise ValueError(f"must be 'auto', 'none' or a whole number of at least 1, not {in_words(value)}")


Text = Annotated[str, Field(min_length=1), AfterValidator(_writable)]
# A shell expands the `~` of no `key=~/path`, and a file has no shell.
PathText = Annotated[
    str,
    BeforeValidator(_as_text),
    Field(min_length=1),
    AfterValidator(_writable),
    AfterValidator(os.path.expanduser),
]
# No real run reaches these bounds. PyTorch, or a float, cannot hold numbers beyond them.
_LARGEST_SIZE = 2**31 - 1
_MOST_PROCESSORS = 4096
Size = Annotated[int, Field(gt=0, le=_LARGEST_SIZE)]
SizeOrAuto = Annotated[
    Size,
    WrapValidator(_auto_or),
    WithJsonSchema(
        {"anyOf": [{"enum": ["auto"]}, {"type": "integer", "exclusiveMinimum": 0, "maximum": _LARGEST_SIZE}]}
    ),
]
Width = Annotated[int, Field(gt=0, le=_LARGEST_SIZE // 4)]  # the feed-forward width that follows it is a size too
Processors = Annotated[int, Field(gt=0, le=_MOST_PROCESSORS)]
Count = Annotated[int, Field(gt=0, le=2**53)]
CountOrZero = Annotated[int, Field(ge=0, le=2**53)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
TextList = Annotated[list[Text], BeforeValidator(_as_list)]
PlainMapping = Annotated[dict[str, Any], AfterValidator(_plain_mapping)]
_DEVICES = r"auto|cpu|mps|cuda(:[0-9]+)?"
Device = Annotated[str, _check_match(_DEVICES, "auto, cpu, mps, cuda or cuda:<index>"), _schema_match(_DEVICES)]
_FACTORIES = r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*"
Factory = Annotated[
    str,
    _check_match(_FACTORIES, "an importable factory, written package.module:function"),
    _schema_match(_FACTORIES),
]


def _schema_choices(*names: str) -> WithJsonSchema:
    """The names that an editor offers, or a factory."""
    return WithJsonSchema({"anyOf": [{"enum": list(names)}, {"type": "string", "pattern": f"^({_FACTORIES})$"}]})


_LOSSES = rf"cross_entropy|mse|{_FACTORIES}"
LossName = Annotated[
    str,
    _check_match(_LOSSES, "cross_entropy, mse, or an importable function, written package.module:function"),
    _schema_match(_LOSSES),
]
Betas = Annotated[list[Fraction], BeforeValidator(_as_list), Field(min_length=2, max_length=2)]
OptimizerName = Annotated[
    str,
    _check_match(
        rf"adamw|adamw8bit|muon|{_FACTORIES}",
        "adamw, adamw8bit, muon, or an importable class or function, written package.module:class",
    ),
    _schema_choices("adamw", "adamw8bit", "muon"),
]
ScheduleName = Annotated[
    str,
    _check_match(
        rf"cosine|constant|linear|wsd|{_FACTORIES}",
        "cosine, constant, linear, wsd, or an importable function, written package.module:function",
    ),
    _schema_choices("cosine", "constant", "linear", "wsd"),
]
FactoryList = Annotated[list[Factory], BeforeValidator(_as_list)]
_METRICS = r"[A-Za-z_][\w-]{0,63}"
MetricName = Annotated[
    str,
    _check_match(_METRICS, "at most 64 letters, digits, '_' and '-', the first a letter"),
    _schema_match(_METRICS),
]
SetName = Annotated[
    str,
    _check_match(r"\w[\w.-]{0,63}", "at most 64 letters, digits, '.', '_' and '-', the first a letter or digit"),
]
_MONITORED = r"(\w[\w.-]*/)?[A-Za-z_][\w.-]*"
Monitored = Annotated[
    str,
    _check_match(_MONITORED, "loss, perplexity, bits_per_byte, the name of a metric, or SET/NAME"),
    _schema_match(_MONITORED),
]
_TUNING = r"off|auto|.+\.json"
Tuning = Annotated[
    str,
    _check_match(_TUNING, "off, auto, or the path of a plan that ends in .json"),
    _schema_match(_TUNING),
]
_COMPONENTS = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
NodeId = Annotated[
    str,
    _check_match(_COMPONENTS, "at most 128 letters, digits, '.', '_' and '-', the first a letter or digit"),
    _schema_match(_COMPONENTS),
]


class Secret(SecretStr):
    """Text that is shown only on request, and can be compared with plain text."""

    def __eq__(self, other: object) -> bool:
        return self.get_secret_value() == other if isinstance(other, str) else super().__eq__(other)

    __hash__ = SecretStr.__hash__


Token = Annotated[Secret, Field(min_length=1)]
Alignment = Annotated[
    int | str,
    BeforeValidator(_alignment),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "none"]}, {"type": "integer", "minimum": 1}]}),
]
# Types of keys that follow others: null until `resolve` sets them, then never null, as the type says.
FollowingCount = Annotated[CountOrZero, WrapValidator(_none_or)]
FollowingInt = Annotated[Size, WrapValidator(_none_or)]
FollowingFraction = Annotated[Fraction, WrapValidator(_none_or)]
FollowingRate = Annotated[NonNegativeFloat, WrapValidator(_none_or)]


def _follows(description: str) -> Any:
    return Field(default=None, description=description)


# --- sections ---


class RunConfig(Section):
    """The run as a whole: name, seed, device, length and output folder."""

    section_name: ClassVar[str] = "run"

    name: Text = Field(default="speedtronic-run", description="Name of the run in logs and reports.")
    seed: Seed = Field(default=1234, description="Seed of every random number of the run.")
    device: Device = Field(
        default="auto",
        description="Where to train: auto (CUDA, then MPS, then CPU), cpu, cuda, cuda:<index>, mps.",
    )
    max_steps: Count = Field(default=1000, description="Optimizer updates to reach.")
    output_dir: PathText = Field(default="runs", description="Folder for what the run writes.")
    log_every: Count | None = Field(
        default=None, description="Optimizer updates between log lines; fills logging.every_steps."
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] = Field(
        default="stop",
        description="What to do at a NaN or infinite loss or gradient: stop the run, skip the update, or ignore it.",
    )
    init_from: PathText | None = Field(
        default=None,
        description="Weights to start from: a safetensors file, a checkpoint, the folder of a run, a Hugging Face "
        "folder. A resumed run does not read them.",
    )
    init_strict: bool = Field(
        default=True,
        description="Whether the weights of init_from must match the model exactly. false loads those whose name and "
        "shape match.",
    )
    deterministic: bool = Field(default=False, description="Use only deterministic algorithms, where they exist.")
    threads: Processors | None = Field(default=None, description="CPU threads; null leaves PyTorch's choice.")


class LoraConfig(BaseModel):
    """Adapters that are trained in place of the weights (LoRA)."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    r: Size = Field(description="Rank of the adapters.")
    alpha: PositiveFloat | None = Field(default=None, description="Their scale is alpha / r. Null: 2 · r.")
    dropout: Fraction = Field(default=0.0, description="Dropout probability of what goes into an adapter.")
    targets: Annotated[list[Text], BeforeValidator(_as_list)] = Field(
        default=[], description="Last names of the layers that get one, such as q_proj. None: all but the head."
    )
    base: Literal["float32", "bfloat16", "4bit"] = Field(
        default="float32", description="How the frozen weights are kept; 4bit needs speedtronic[bitsandbytes]."
    )


class ModelConfig(Section):
    """The model and its sizes. A custom model reads the same keys, and `extra`."""

    section_name: ClassVar[str] = "model"
    following: ClassVar[tuple[str, ...]] = ("n_kv_head", "d_ff", "hf_folder")

    name: Text = Field(
        default="reference_transformer",
        description="Registered model: reference_transformer, gpt, or one of a plugin. hf: the causal language model "
        "that the config.json in hf_folder describes, which needs speedtronic[transformers]; of the sizes here it "
        "takes max_seq_len alone.",
    )
    vocab_size: Size = Field(default=512, description="Vocabulary V, in token ids.")
    max_seq_len: Size = Field(default=128, description="Longest sequence T, in tokens.")
    n_layer: Size = Field(default=4, description="Transformer blocks.")
    n_head: Size = Field(default=8, description="Query heads; divides d_model.")
    n_kv_head: FollowingInt = _follows("Key and value heads; divides n_head. Null: n_head.")
    d_model: Width = Field(default=256, description="Model width D.")
    d_ff: FollowingInt = _follows("Nominal feed-forward width; SwiGLU uses 2/3 of it. Null: 4 · d_model.")
    dropout: Fraction = Field(default=0.0, description="Dropout probability.")
    tie_weights: bool = Field(default=True, description="Share the input embedding with the output head.")
    rope_base: PositiveFloat = Field(default=10000.0, description="Base of the rotary position frequencies.")
    qk_norm: bool = Field(default=False, description="Normalise the queries and keys of each head.")
    ngram_order: Size = Field(
        default=1,
        description="Longest run of tokens, at most max_seq_len, that has its own embedding, added to that of its last "
        "token. Each length above 1 takes ngram_buckets · d_model weights. No Hugging Face model has these.",
    )
    ngram_buckets: Size = Field(default=4096, description="Rows of each table of runs; runs are hashed to them.")
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations in the backward pass to save memory."
    )
    hf_folder: PathText | None = _follows(
        "For name: hf, a folder that save_pretrained has written. Null: run.init_from."
    )
    lora: LoraConfig | None = Field(
        default=None,
        description="For name: hf, adapters that are trained in place of the weights of hf_folder, which stay frozen: "
        "a mapping with r (their rank), and alpha (2 · r), dropout (0), targets (last names of the layers that get "
        "one; all but the head) and base (float32, bfloat16 or 4bit: how the frozen weights are kept). Needs "
        "speedtronic[peft]; 4bit needs speedtronic[bitsandbytes].",
    )
    extra: PlainMapping = Field(
        default={},
        description="Free keys, passed to the factory of a custom model; for name: hf, values in place of those of its "
        "config.json.",
    )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for key in ("hf_folder", "lora"):
            if values.get(key) is not None and values.get("name", "hf") != "hf":
                yield key, f"is for model.name: hf, not {values['name']}; leave it out"
        heads, kv_heads, width = (values.get(key) for key in ("n_head", "n_kv_head", "d_model"))
        if heads and width and width % heads:
            yield "d_model", f"{width} must be divisible by model.n_head, which is {heads}"
        if heads and kv_heads and heads % kv_heads:
            yield "n_kv_head", f"{kv_heads} must divide model.n_head, which is {heads}"
        order, length = values.get("ngram_order"), values.get("max_seq_len")
        if order and length and order > length:
            yield "ngram_order", f"{order} must be at most model.max_seq_len, which is {length}"

    def resolve(self) -> None:
        self.follow("n_kv_head", self.n_head)
        self.follow("d_ff", 4 * self.d_model)

    @property
    def without_hugging_face_form(self) -> str | None:
        """Why `transformers` has no form of the reference transformer with these values; None if it has one."""
        if self.ngram_order == 1:
            return None
        return (
            f"model.ngram_order is {self.ngram_order}, and no model of Hugging Face's transformers has embeddings of "
            "runs of tokens"
        )


class DataConfig(Section):
    """Where the tokens come from, and how they become batches."""

    section_name: ClassVar[str] = "data"
    following: ClassVar[tuple[str, ...]] = ("vocab_size", "block_size", "seed", "validation_fraction")

    text_path: PathText | None = Field(default=None, description="UTF-8 text file to train on.")
    dataset: Factory | None = Field(
        default=None,
        description="Importable factory package.module:function; called with this section, returns a "
        "Dataset, an IterableDataset, or a pair (training, validation).",
    )
    shards: PathText | None = Field(default=None, description="Folder written by `speedtronic data prepare`.")
    chat: PathText | None = Field(
        default=None,
        description="File of chats, .jsonl or .parquet, each with `messages`; the chat template of tokenizer makes a "
        "document of each, of which the assistant's tokens are targets.",
    )
    mixture: dict[PathText, PositiveFloat] | None = Field(
        default=None,
        description="Several such folders, each with its weight: how often its samples come, in any unit.",
    )
    packing: Literal["concat", "best_fit"] = Field(
        default="concat",
        description="How the documents of shards fill the training sequences: one behind the other, cut where a "
        "sequence ends; or whole documents where they fit best, with padding behind them.",
    )
    synthetic: bool = Field(default=True, description="Use random tokens if no other source is named.")
    num_tokens: Count = Field(default=100_000, description="Synthetic tokens in an epoch.")
    tokenizer: PathText = Field(
        default="bytes",
        description="Of text_path: bytes, chars (the characters of the text), or the path of a tokenizer file. Of "
        "chat: the path of one with a chat template. Beside dataset, a tokenizer file says what the ids mean: "
        "checkpoints keep it, for generate.",
    )
    vocab_size: Size | None = Field(default=None, description="Token ids in use. Null: model.vocab_size.")
    block_size: Size | None = Field(
        default=None, description="Tokens T in a training sequence. Null: model.max_seq_len."
    )
    micro_batch_size: SizeOrAuto = Field(
        default=1, description="Sequences in one forward pass. auto: the fastest number within memory; needs tune."
    )
    target_batch_size: Size = Field(
        default=1, description="Sequences in one optimizer update; a multiple of micro_batch_size."
    )
    validation_fraction: FollowingFraction = _follows(
        "Share of the data, from its end, that is held out for evaluation. Null: 0.1 if eval.every_steps is set and "
        "neither data.dataset nor eval.sets is, else 0."
    )
    num_workers: Annotated[int, Field(ge=0, le=_MOST_PROCESSORS)] = Field(
        default=0, description="Processes that read data; 0 reads in the training process."
    )
    prefetch_factor: Size | None = Field(
        default=None, description="Batches that each worker reads ahead; null leaves PyTorch's choice."
    )
    pin_memory: bool | None = Field(default=None, description="Page-locked host memory. Null: on CUDA.")
    shuffle: bool = Field(default=False, description="New order in each epoch, a function of (seed, epoch).")
    drop_last: bool = Field(default=True, description="Drop a last batch that is not full.")
    seed: Seed | None = Field(default=None, description="Seed of data and order. Null: run.seed.")
    max_steps: Count | None = Field(
        default=None,
        description="Optimizer updates to reach. Takes precedence over run.max_steps; the schedule stays the same.",
    )
    loss_normalization: Literal["micro_batch", "tokens"] = Field(
        default="micro_batch",
        description="Under accumulation: mean of the micro batches' means, or the sum over all valid "
        "labels of the update divided by their number.",
    )
    labels: Literal["aligned", "unshifted"] = Field(
        default="aligned",
        description="aligned: label t is the token after input t. unshifted: labels equal the inputs, and "
        "Speedtronic shifts them.",
    )
    document_mask: bool = Field(
        default=False, description="Keep attention within a document. Needs shards, which know where documents start."
    )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        target, micro = values.get("target_batch_size"), values.get("micro_batch_size")
        if target and micro and micro != "auto" and target % micro:
            remedy = -(-target // micro) * micro
            yield (
                "target_batch_size",
                f"{target} must be a multiple of data.micro_batch_size ({micro}), such as {remedy}",
            )
        named = [key for key in ("text_path", "shards", "mixture", "chat") if values.get(key) is not None]
        if len(named) > 1:
            yield named[1], f"name one source of data, not both data.{named[0]} and data.{named[1]}"
        if values.get("mixture") == {}:
            yield "mixture", "names no folder; leave it out, or give folders with their weights"
        tokenizer = values.get("tokenizer", "bytes")
        if values.get("chat") is not None and tokenizer in ("bytes", "chars"):
            yield "chat", "needs data.tokenizer, a tokenizer with a chat template; other chats go through data prepare"
        no_text = values.get("text_path", "wrong already") is None and values.get("chat", "wrong already") is None
        if tokenizer != "bytes" and no_text:
            if values.get("dataset", "wrong already") is None:
                prepared = values.get("shards") or values.get("mixture")
                reason = "shards have their own" if prepared else "there is no text to encode"
                yield "tokenizer", f"is for data.text_path; {reason}, so leave it out"
            elif tokenizer == "chars":
                yield "tokenizer", "chars are those of data.text_path; beside data.dataset, name a tokenizer file"
        has_documents = values.get("dataset") is None and any(
            values.get(key, "wrong already") is not None for key in ("shards", "mixture", "chat")
        )
        if values.get("document_mask") and not has_documents:
            yield "document_mask", "needs data.shards: no other source of data knows where documents start"
        if values.get("packing") == "best_fit" and not has_documents:
            yield "packing", "best_fit needs data.shards: no other source of data knows where documents start"

    @property
    def source(self) -> Literal["dataset", "shards", "text_path", "mixture", "chat", "synthetic"] | None:
        """The key that says where the data comes from; None if none does."""
        if self.dataset is not None:
            return "dataset"
        if self.shards is not None:
            return "shards"
        if self.text_path is not None:
            return "text_path"
        if self.mixture is not None:
            return "mixture"
        if self.chat is not None:
            return "chat"
        return "synthetic" if self.synthetic else None


class ParameterGroup(BaseModel):
    """Options of the parameters whose names match a pattern. What is null is as in `optimizer`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    match: Text = Field(
        description="Pattern of whole parameter names, as a shell has them: * is any text, ? one character, [0-5] one "
        "of these."
    )
    lr: NonNegativeFloat | None = Field(
        default=None, description="Peak learning rate, whatever the algorithm; layer_decay comes on top."
    )
    weight_decay: NonNegativeFloat | None = Field(
        default=None, description="Decoupled weight decay; of norms and biases with decay_1d alone."
    )
    betas: Betas | None = Field(default=None, description="AdamW's decay rates; Muon has none.")
    eps: PositiveFloat | None = Field(default=None, description="AdamW's term in the denominator.")
    frozen: bool = Field(default=False, description="Never train these parameters: the optimizer does not get them.")
    train_from: CountOrZero = Field(default=0, description="Optimizer updates before the first that trains them.")
    train_until: Count | None = Field(
        default=None, description="Number of the last update that trains them; null: until the end."
    )

    @model_validator(mode="after")
    def _agrees(self) -> ParameterGroup:
        if self.train_until is not None and self.train_until <= self.train_from:
            raise ValueError(f"train_until {self.train_until} must be more than train_from {self.train_from}")
        options = (self.lr, self.weight_decay, self.betas, self.eps, self.train_from or None, self.train_until)
        if self.frozen and any(option is not None for option in options):
            raise ValueError("frozen parameters have no other options: the optimizer does not get them")
        return self


class OptimizerConfig(Section):
    """The optimizer of the inner loop."""

    section_name: ClassVar[str] = "optimizer"
    following: ClassVar[tuple[str, ...]] = ("muon_lr",)

    name: OptimizerName = Field(
        default="adamw",
        description="adamw for all parameters; adamw8bit, whose state takes a quarter of the memory and which needs "
        "speedtronic[bitsandbytes]; or muon for hidden matrices and AdamW for the rest. Or an importable "
        "class package.module:class, such as torch.optim:SGD, or a function; called with the parameter groups, lr and "
        "args.",
    )
    args: PlainMapping = Field(default={}, description="Keyword arguments of an optimizer that is named by its class.")
    lr: NonNegativeFloat = Field(default=3e-4, description="Peak learning rate.")
    betas: Betas = Field(default=[0.9, 0.95], description="AdamW's decay rates of the first and second moment.")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's term in the denominator.")
    weight_decay: NonNegativeFloat = Field(default=0.1, description="Decoupled weight decay.")
    decay_1d: bool = Field(default=False, description="Decay norms and biases too, not only matrices.")
    fused: bool | None = Field(default=None, description="Fused AdamW kernel. Null: wherever torch has it.")
    grad_clip: PositiveFloat | None = Field(
        default=None, description="Largest global gradient norm; null does not clip."
    )
    grad_clip_value: PositiveFloat | None = Field(
        default=None, description="Largest size of any entry of a gradient; null does not clip. Instead of grad_clip."
    )
    groups: Annotated[list[ParameterGroup], BeforeValidator(_as_list)] = Field(
        default=[],
        description="Options by the names of parameters: mappings with match and what differs from this section: lr, "
        "weight_decay, betas, eps; frozen; train_from and train_until, numbers of updates. The first that matches "
        "counts; one that is left nothing is refused.",
    )
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Layer-wise learning rates: what follows the blocks that the model repeats has the full rate, the "
        "last block this share of it, each block this share of the next one's, and what comes before them this share "
        "of the first one's. Null: one rate.",
    )
    cautious: bool = Field(
        default=False, description="Keep only the entries of an update whose sign agrees with the gradient."
    )
    cautious_rescale: bool = Field(
        default=False,
        description="Multiply the kept entries of each parameter's cautious update by entries / (kept + 1); needs "
        "cautious.",
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="Decay per update of an exponential moving average of the weights. Evaluation, export, generate "
        "and init_from use the average instead of the weights. It takes as much memory as the trained weights in "
        "float32. Null keeps none.",
    )
    muon_plus: bool = Field(
        default=False, description="Normalise rows, then columns, after orthogonalisation; needs muon."
    )
    muon_lr: FollowingRate = _follows("Peak learning rate of the matrices that Muon owns. Null: lr.")
    muon_momentum: Fraction = Field(default=0.95, description="Muon's momentum.")
    muon_ns_steps: Size = Field(default=5, description="Newton–Schulz iterations in a Muon step.")
    muon_norm_eps: PositiveFloat = Field(default=1e-8, description="Smallest norm in muon_plus's normalisation.")
    muon_scale: Literal["original", "match_rms_adamw"] = Field(
        default="original",
        description="Scale of Muon's update: sqrt(max(1, rows/columns)), or AdamW's typical RMS.",
    )
    muon_coefficients: Literal["quintic", "polar_express"] = Field(
        default="quintic",
        description="Coefficients of the Newton–Schulz iterations: polar_express comes closer to the polar factor.",
    )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        name = values.get("name", "muon")
        if values.get("muon_plus") and name != "muon":
            yield "muon_plus", f"needs optimizer.name: muon, not {name}"
        if values.get("args") and name in ("adamw", "adamw8bit", "muon"):
            yield "args", f"is for an optimizer that is named as package.module:class; {name} has keys of its own"
        if values.get("grad_clip") and values.get("grad_clip_value"):
            yield "grad_clip_value", "is instead of optimizer.grad_clip; leave one of the two out"
        if values.get("cautious_rescale") and values.get("cautious") is False:
            yield "cautious_rescale", "needs optimizer.cautious: true; only a cautious update is rescaled"

    def resolve(self) -> None:
        self.follow("muon_lr", self.lr)


class SchedulerConfig(Section):
    """The learning rate over the optimizer updates."""

    section_name: ClassVar[str] = "scheduler"
    following: ClassVar[tuple[str, ...]] = ("max_steps", "warmup_steps")

    name: ScheduleName = Field(
        default="cosine",
        description="Curve after the warmup; wsd is warmup, stable, decay. Or an importable function "
        "package.module:function; called with this section and args, returns a function from the number of updates so "
        "far to a share of the peak learning rate.",
    )
    args: PlainMapping = Field(default={}, description="Keyword arguments of a function that name names.")
    warmup_steps: FollowingCount = _follows(
        "Updates of linear warmup. Null: a tenth of max_steps, at most 100; a resumed run keeps the number."
    )
    max_steps: Count = Field(
        default=1000, description="Update at which the curve ends. Follows run.max_steps unless given."
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.1, description="Learning rate at the end, as a share of the peak."
    )
    decay_steps: Count | None = Field(
        default=None,
        description="Updates of the final decay of wsd, no more than follow the warmup. Null: a fifth of max_steps, or "
        "all that follow the warmup if those are fewer.",
    )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if values.get("args") and ":" not in values.get("name", ":"):
            yield (
                "args",
                f"is for a function that scheduler.name names as package.module:function, not {values['name']}",
            )

    def resolve(self) -> None:
        self.follow("warmup_steps", min(100, self.max_steps // 10))

    def check_decay(self) -> str | None:
        """What is wrong with `decay_steps`; None if nothing is.

        A decay that begins before the warmup has ended makes the learning rate jump.
        """
        left = max(0, self.max_steps - self.warmup_steps)
        if self.name != "wsd" or self.decay_steps is None or self.decay_steps <= left:
            return None
        return (
            f"{self.decay_steps} is more than the {left} updates that follow the warmup (scheduler.max_steps "
            f"{self.max_steps} - warmup_steps {self.warmup_steps}): the learning rate would jump; use at most {left}"
        )


class PrecisionConfig(Section):
    """The arithmetic of forward and backward."""

    section_name: ClassVar[str] = "precision"

    mode: Literal["auto", "bf16", "fp16", "fp32", "fp8"] = Field(
        default="auto", description="auto: bf16 on CUDA, or fp16 where the device has no bf16; fp32 on CPU and MPS."
    )
    dtype: Literal["bfloat16", "float16", "float32"] | None = Field(
        default=None, description="Autocast dtype in mode auto; null: the mode decides."
    )
    tf32: bool | None = Field(
        default=None,
        description="On CUDA, compute float32 products and convolutions in TF32: faster, with 10 bits after the point. "
        "Null: torch's own setting, which is TF32 for convolutions alone.",
    )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        mode, dtype = values.get("mode"), values.get("dtype")
        own = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(str(mode))
        if own and dtype and dtype != own:
            yield "dtype", f"{dtype} contradicts precision.mode: {mode}; leave one of the two out"


class CheckpointConfig(Section):
    """When checkpoints are written, and which are kept."""

    section_name: ClassVar[str] = "checkpoint"

    enabled: bool = Field(default=True, description="Write checkpoints.")
    directory: PathText = Field(default="checkpoints", description="Folder, relative to run.output_dir.")
    every_steps: Count = Field(default=500, description="Optimizer updates between checkpoints.")
    every_minutes: PositiveFloat | None = Field(
        default=None, description="Minutes between checkpoints, in addition to every_steps."
    )
    keep_last: Count | None = Field(default=3, description="Newest checkpoints to keep; null keeps all.")
    keep_every: Count | None = Field(
        default=None, description="Never delete the checkpoints of steps that are a multiple of this."
    )
    keep_best: CountOrZero = Field(
        default=0,
        description="Checkpoints to keep in addition, the best by eval.monitor. Only those written at an evaluated "
        "step count.",
    )
    background: bool = Field(default=True, description="Write in the background, from a snapshot.")
    resume: bool | Literal["auto"] = Field(
        default=False,
        description="Continue from the newest sound checkpoint. auto: start anew without a warning where there is none "
        "yet, for launchers that start a run again by themselves.",
    )
    mirror: Text | None = Field(
        default=None,
        description="A store for copies of the checkpoints: dir:///path, s3://bucket/prefix, …, one for each run; each "
        "node of distributed has its own part of it. A resumed run that finds an empty disk continues from there.",
    )
    mirror_options: PlainMapping = Field(
        default={}, description="Free keys, passed to the store of mirror: endpoint, profile, region, …"
    )


# The numbers of the event `train_step`; those that it has of an interval too are shown of the interval.
StepField = Literal[
    "step",
    "loss",
    "lr",
    "steps_per_sec",
    "samples_per_sec",
    "tokens_per_sec",
    "samples",
    "tokens",
    "micro_batches",
    "grad_norm",
    "lr_applied",
    "peak_memory_bytes",
    "peak_reserved_bytes",
    "gpu_busy_percent",
    "eta_s",
    "mfu",
    "losses",
]


class LoggingConfig(Section):
    """What is logged, and where to."""

    section_name: ClassVar[str] = "logging"
    following: ClassVar[tuple[str, ...]] = ("every_steps", "json_file")

    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], BeforeValidator(_in_capitals)] = Field(
        default="INFO", description="Lowest severity that is shown."
    )
    file: PathText | None = Field(default=None, description="Text file for the log lines.")
    json_file: PathText | None = Field(
        default=None, description="JSON Lines file for the events. Null: metrics.jsonl where there are trackers."
    )
    every_steps: Count = Field(
        default=1,
        description="Optimizer updates between log lines. Follows run.log_every, if that is set, unless given.",
    )
    progress: Literal["auto", "on", "off"] = Field(
        default="auto", description="Live progress line; auto shows it on a terminal."
    )
    fields: list[StepField] | None = Field(
        default=None,
        description="What a line about a step shows, in this order. Null: step, loss, lr, tokens_per_sec, grad_norm. "
        "json_file has all.",
    )
    trackers: Annotated[list[Literal["tensorboard", "wandb", "mlflow", "trackio"]], BeforeValidator(_as_list)] = Field(
        default=[],
        description="Experiment trackers to report to. Each is fed from json_file, and needs the extra of its name; "
        "its environment variables apply.",
    )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        file, json_file = values.get("file"), values.get("json_file")
        if file and json_file and os.path.normpath(file) == os.path.normpath(json_file):
            yield "json_file", "names the same file as logging.file; give each its own"

    def resolve(self) -> None:
        self.follow("json_file", "metrics.jsonl" if self.trackers else None)


HELD_OUT = "held_out"
"""The set of evaluations that `data.validation_fraction` or `data.dataset` holds out of the training data."""

MEASURES = ("loss", "perplexity", "bits_per_byte")
"""What an evaluation measures without metrics of a user's own; the last two of language models alone."""

_NUMBERS_OF_A_RECORD = (*MEASURES, "step", "set", "targets", "batches", "duration_s", "version", "best_version")


class EvalMetric(BaseModel):
    """A metric of a user's own."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    name: MetricName = Field(description="Its name in the records.")
    factory: Factory = Field(
        description="Importable package.module:callable that returns an object with update(preds, target), compute() "
        "and reset()."
    )
    args: PlainMapping = Field(default={}, description="Keyword arguments of the factory.")


class EvalSet(BaseModel):
    """Data to evaluate on that is not a part of the training data. What is null is as in `data`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    text_path: PathText | None = Field(default=None, description="UTF-8 text, encoded as the training data is.")
    shards: PathText | None = Field(default=None, description="Folder written by `speedtronic data prepare`.")
    dataset: Factory | None = Field(
        default=None,
        description="Importable factory package.module:function; called with the data section of this set, returns a "
        "Dataset or an IterableDataset.",
    )
    block_size: Size | None = Field(default=None, description="Tokens T in a sequence.")
    micro_batch_size: Size | None = Field(default=None, description="Sequences in one forward pass.")
    labels: Literal["aligned", "unshifted"] | None = Field(default=None, description="As data.labels.")
    document_mask: bool | None = Field(default=None, description="As data.document_mask.")


class EvalConfig(Section):
    """Evaluation while training, and by `speedtronic eval`."""

    section_name: ClassVar[str] = "eval"

    every_steps: Count | None = Field(
        default=None, description="Optimizer updates between evaluations; null evaluates at the end only."
    )
    batches: Count | None = Field(default=None, description="Batches of each set in an evaluation; null takes all.")
    at_end: bool = Field(default=True, description="Evaluate after the last update.")
    sets: dict[SetName, EvalSet] = Field(
        default={},
        description="Further data to evaluate on, by name; each is a mapping with one of text_path, shards and "
        "dataset, and, where it differs from data, block_size, micro_batch_size, labels and document_mask. Each gets "
        "a record of its own.",
    )
    metrics: Annotated[list[EvalMetric], BeforeValidator(_as_list)] = Field(
        default=[],
        description="Metrics beside the loss: mappings with name, factory (package.module:callable, such as a class of "
        "torchmetrics) and args, its keyword arguments. What it returns has update(preds, target), compute() and "
        "reset().",
    )
    monitor: Monitored = Field(
        default="loss",
        description="The number that patience, the best checkpoint and keep_best go by: loss, perplexity, "
        "bits_per_byte or the name of a metric, of the held-out part, or of the first set where nothing is held out. "
        "SET/NAME is that of another set.",
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="Whether a lower or a higher number is better; needed unless a loss is monitored."
    )
    patience: Count | None = Field(
        default=None,
        description="Training stops after this many evaluations of every_steps without improvement; null never stops.",
    )
    min_delta: NonNegativeFloat = Field(
        default=0.0, description="Smallest change of the monitored number that counts as improvement."
    )
    samples: CountOrZero = Field(
        default=0, description="Texts to write at each evaluation, for each of the prompts; 0 writes none."
    )
    prompts: Annotated[list[Annotated[str, AfterValidator(_writable)]], BeforeValidator(_as_list)] = Field(
        default=[], description="Texts to continue; without any, the model begins a document."
    )
    sample_tokens: Size = Field(default=100, description="Most tokens of a text that the model writes.")

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if "monitor" in values and "mode" in values:
            name, mode = values["monitor"], values["mode"]
            if name.rpartition("/")[2] == "loss":
                if mode == "max":
                    yield "mode", f"max would take the worst by eval.monitor: {name}; leave it out"
            elif mode is None:
                yield "mode", f"needed for eval.monitor: {name}; min if a lower number is better, max if a higher one"
        if values.get("patience") is not None and values.get("every_steps", "wrong already") is None:
            yield "patience", "counts the evaluations of eval.every_steps, which is null; set it"
        if values.get("prompts") and values.get("samples") == 0:
            yield "prompts", "need eval.samples, the number of texts for each prompt; set it to 1"
        # A metric of a name that is taken would hide the other number in the records.
        names = [_named(one, "name") for one in values.get("metrics") or ()]
        for number, name in enumerate(names):
            if name in _NUMBERS_OF_A_RECORD or name in names[:number]:
                yield "metrics", f"the name {name!r} is taken; give the metric another one"
        for name, one in (values.get("sets") or {}).items():
            sources = [key for key in ("text_path", "shards", "dataset") if _named(one, key) is not None]
            if name == HELD_OUT:
                yield "sets", f"{HELD_OUT} is the held-out part of the training data; give this set another name"
            if len(sources) != 1:
                found = f"not {' and '.join(sources)}" if sources else "and it has none"
                yield "sets", f"{name} needs one source of text_path, shards and dataset, {found}"
            if _named(one, "document_mask") and sources != ["shards"]:
                yield "sets", f"{name} has a document_mask, which only shards can have; leave it out"

    @property
    def better(self) -> Literal["min", "max"]:
        """Which of two monitored numbers is better."""
        return self.mode or "min"


def _named(one: Any, key: str) -> Any:
    """A key of a mapping, or of the object that was made of it."""
    return one.get(key) if isinstance(one, Mapping) else getattr(one, key)


class ShapeValidationConfig(Section):
    """Warnings at start about sizes that the hardware runs slowly."""

    section_name: ClassVar[str] = "shape_validation"

    enabled: bool = Field(default=True, description="Look at shapes before training.")
    alignment: Alignment = Field(
        default="auto",
        description="Sizes should be multiples of this: auto (8 for bf16 and fp16 on CUDA), none, or a whole number.",
    )
    check_batch: bool = Field(default=True, description="Look at the micro batch size.")
    check_sequence: bool = Field(default=True, description="Look at the sequence length.")
    check_model: bool = Field(default=True, description="Look at the model's widths.")
    check_vocab: bool = Field(default=False, description="Look at the vocabulary size.")
    warn_on_cpu: bool = Field(
        default=False, description="Warn on CPU and MPS too. Needs alignment to be a number: auto has none there."
    )


class DistributedConfig(Section):
    """DumbDiLoCo: nodes that share nothing but a store train one model together."""

    section_name: ClassVar[str] = "distributed"

    enabled: bool = Field(default=False, description="Train together with other nodes.")
    mode: Literal["dumb_diloco"] = Field(default="dumb_diloco", description="How the nodes train together.")
    role: Literal["single", "master", "worker"] = Field(
        default="single",
        description="What this node does. An enabled single node with a repo_id becomes master.",
    )
    node_id: NodeId | None = Field(
        default=None,
        description="Name of this node: one path component. Null: created once and kept in state_dir.",
    )
    inner_steps: Count = Field(default=500, description="Optimizer updates between two uploads.")
    poll_interval: PositiveFloat = Field(default=60.0, description="Seconds between looks at the store.")
    outer_lr: PositiveFloat | None = Field(
        default=None,
        description="Learning rate of the outer step. Null: 1.0, or 0.7 if a round waits for all nodes.",
    )
    outer_momentum: Fraction | None = Field(
        default=None,
        description="Momentum of the outer step. Null: 0.5, or 0.9 if a round waits for all nodes.",
    )
    outer: Literal["nesterov", "sgd", "delayed_nesterov", "sparse_loco"] = Field(
        default="nesterov", description="Optimizer of the outer step."
    )
    repo_id: Text | None = Field(
        default=None,
        description="The store: dir:///path, s3://bucket/prefix, hf://buckets/namespace/bucket, az://container, "
        "gs://bucket; needed when enabled.",
    )
    worker_repo_id: Text | None = Field(default=None, description="Store of this worker's own uploads. Null: repo_id.")
    token: Annotated[Token | None, BeforeValidator(_not_redacted)] = Field(
        default=None,
        description="A token is refused: credentials of stores come from the environment. Never shown or saved.",
    )
    store_options: PlainMapping = Field(
        default={}, description="Free keys, passed to the store: endpoint, profile, region, …"
    )
    state_dir: PathText = Field(default=".speedtronic/diloco", description="Folder for the spool and the ledger.")
    retry_initial: PositiveFloat = Field(default=1.0, description="Seconds before the first retry.")
    retry_max: PositiveFloat = Field(default=60.0, description="Longest pause between retries, in seconds.")
    retry_attempts: Count = Field(default=6, description="Attempts at one request.")
    reset_inner_optimizer: bool = Field(
        default=False, description="Clear the inner optimizer's state after a synchronisation."
    )
    async_delta_upload: bool = Field(default=True, description="Upload in the background.")
    delta_upload_shutdown_timeout: NonNegativeFloat = Field(
        default=5.0, description="Seconds to wait for the last upload at the end."
    )
    async_global_poll: bool = Field(default=True, description="Look for new global weights in the background.")
    expected_nodes: Count | None = Field(
        default=None,
        description="Nodes that take part, for the first five versions; then those that took part lately count.",
    )
    quorum: Count | None = Field(
        default=None, description="Nodes whose deltas start a round. Null: half of those that take part."
    )
    grace: NonNegativeFloat | None = Field(
        default=None,
        description="Seconds after which a round starts without quorum. Null: the median of a node's round.",
    )
    max_staleness: NonNegativeFloat | None = Field(
        default=None,
        description="A delta that is older than this, in rounds, is rejected; null: no age limit.",
    )
    keep_versions: Count = Field(default=8, description="Versions of the global weights to keep in the store.")
    codec: Literal["fp32", "bf16", "int8", "int4", "int2", "topk"] = Field(
        default="fp32", description="Encoding of the deltas."
    )
    trusted_nodes: TextList = Field(
        default=[],
        description="Public keys (Ed25519) of the nodes to accept deltas from; empty trusts every writer.",
    )
    robust: Literal["none", "clip", "trimmed_mean"] = Field(
        default="none", description="How to average so that one hostile node can do little harm."
    )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if values.get("enabled") and values.get("repo_id", "wrong already") is None:
            yield (
                "repo_id",
                "needed when distributed.enabled is true; name a store, such as dir:///path or org/name",
            )
        initial, longest = values.get("retry_initial"), values.get("retry_max")
        if initial and longest and initial > longest:
            yield (
                "retry_max",
                f"{longest} must not be less than distributed.retry_initial, which is {initial}",
            )
        quorum, nodes = values.get("quorum"), values.get("expected_nodes")
        if quorum and nodes and quorum > nodes:
            yield "quorum", f"{quorum} is more than distributed.expected_nodes, which is {nodes}"

    def resolve(self) -> None:
        if self.enabled and self.role == "single" and self.repo_id is not None:
            self.__dict__["role"] = "master"


class CompileOptions(Section):
    """How `compile: true` compiles."""

    section_name: ClassVar[str] = "compile_options"

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        default=None,
        description="Mode of torch.compile; null is PyTorch's default. On CUDA, reduce-overhead and max-autotune "
        "record graphs, which need one micro batch an update.",
    )
    dynamic: bool | None = Field(default=None, description="Compile for changing shapes; null lets PyTorch find out.")
    regional: bool = Field(
        default=False,
        description="Compile the blocks that the model repeats, once for all of them, instead of the whole model.",
    )


class ParallelConfig(Section):
    """How the processes that torchrun starts train one model."""

    section_name: ClassVar[str] = "parallel"

    strategy: Literal["auto", "ddp", "fsdp", "none"] = Field(
        default="auto",
        description="ddp: each process has the whole model, on its own device, and a part of each update. auto is ddp. "
        "none: each process trains on its own, whatever its launcher says.",
    )
    shard_within_node: bool = Field(default=False, description="With fsdp: shard within a machine only.")
    cpu_offload: bool = Field(default=False, description="With fsdp: keep the shards in the memory of the host.")
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Arithmetic in which gradients are summed over the ranks; null is their own."
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="Accepted for those who know it from elsewhere. Weights that some ranks do not use in an update "
        "are found without it.",
    )
    timeout: PositiveFloat = Field(
        default=600.0, description="Seconds that ranks wait for one that does not come. Then they name it and end."
    )
