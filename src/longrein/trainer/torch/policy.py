"""The policy: a Hugging Face causal language model that is trained, sampled from and saved.

The model itself is always transformers' own class. `load_policy` reads a folder or hub name and refuses what would
later be silently wrong (missing weights, dropout, a context the model does not have). `sampling_model` and `refresh`
give the sampler weights of its own where it cannot use the learner's: in a lower precision, or with LoRA merged in.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from longrein import config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What a checkpoint needs beside config and weights so that transformers and other engines serve it as it was trained.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


class PolicyError(Exception):
    """A model that cannot be trained or sampled from. The message names the folder or option and what to do."""


@dataclass
class Policy:
    """A causal language model and where it came from.

    `model` is what the learner optimizes: the transformers model itself, or peft's wrapper around it when `lora`.
    """

    model: nn.Module
    device: torch.device
    context: int
    """Longest prompt plus reply in tokens."""
    folder: Path
    """Folder that the weights and the tokenizer were read from."""
    lora: bool = False
    chat_template: Path | None = None
    """Template used instead of the folder's own; checkpoints carry it."""

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding: valid token ids are 0 … vocab_size - 1."""
        return int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator,union-attr]

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint in Hugging Face format, tokenizer and template included.

        With LoRA the weights are the merged ones and the adapter alone is in the folder `adapter`.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.lora:
            merged_model(self).save_pretrained(folder)  # type: ignore[operator]
            # Without save_embedding_layers peft asks the hub whether the vocabulary was resized.
            self.model.save_pretrained(folder / "adapter", save_embedding_layers=False)  # type: ignore[operator]
        else:
            self.model.save_pretrained(folder)  # type: ignore[operator]
        for name in _TOKENIZER_FILES:
            if (self.folder / name).is_file() and (self.folder / name).resolve() != (folder / name).resolve():
                shutil.copyfile(self.folder / name, folder / name)
        if self.chat_template is not None:
            shutil.copyfile(self.chat_template, folder / "chat_template.jinja")


def load_policy(options: config.Model, seed: int) -> Policy:
    """Load `options.path` for training; `seed` makes the LoRA adapters' initial values.

    Raises PolicyError for a folder or hub name that holds no usable causal language model, and for options that the
    model cannot honour.
    """
    device = _device(options.device)
    folder = find_folder(options.path)
    model = _load_model(folder, _DTYPES[options.dtype])
    _refuse_dropout(model, folder)
    context = _context(options.context, model, folder)
    if options.lora.rank:
        model = _with_lora(model, options.lora, seed)
    template = Path(options.chat_template) if options.chat_template else None
    return Policy(model.to(device).eval(), device, context, folder, bool(options.lora.rank), template)


def find_folder(path: str) -> Path:
    """The local folder of a model folder or hub name; a hub name is downloaded into the hub's cache first."""
    if not path:
        raise PolicyError(
            "model.path is empty: name a model folder (config.json, *.safetensors, tokenizer.json) or a hub name"
        )
    folder = Path(path).expanduser()
    if not folder.is_dir() and _is_hub_name(path):
        folder = _download(path)
    if not folder.is_dir():
        raise PolicyError(
            f"model.path: {folder} is not a folder. Put a model in Hugging Face format there (config.json, "
            "*.safetensors, tokenizer.json), or give another folder or a hub name such as Qwen/Qwen3-0.6B"
        )
    if not (folder / "config.json").is_file():
        raise PolicyError(
            f"model.path: {folder} has no config.json, so it is not a model folder in Hugging Face format"
        )
    return folder


def sampling_model(policy: Policy, sample_dtype: str) -> nn.Module:
    """The module the sampler computes with: the learner's own, or a copy that `refresh` brings up to date.

    A copy is made when `sample_dtype` ("same", "float32" or "bfloat16") differs from the learner's type, and with LoRA
    always, because merged weights are sampled from faster than adapters.
    """
    dtype = next(policy.model.parameters()).dtype if sample_dtype == "same" else _DTYPES[sample_dtype]
    same_type = dtype == next(policy.model.parameters()).dtype
    return policy.model if same_type and not policy.lora else merged_model(policy, dtype)


def merged_model(policy: Policy, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the plain transformers model, LoRA merged in, with its parameters in `dtype` (None: the learner's)."""
    model = copy.deepcopy(policy.model)
    if policy.lora:
        model = cast(nn.Module, cast(Any, model).merge_and_unload())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
        # Only parameters: rotary frequencies are float32 buffers in every precision.
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model.eval()


@torch.no_grad()
def refresh(copy: nn.Module, policy: Policy) -> None:
    """Copy the policy's weights into `copy` (made by `sampling_model`) in place, LoRA merged in.

    Nothing happens when `copy` is the policy's own module.
    """
    if copy is policy.model:
        return
    targets = dict(copy.named_parameters())
    sources = dict(merged_weights(policy))
    if targets.keys() != sources.keys():
        odd = sorted(targets.keys() ^ sources.keys())
        raise PolicyError(f"the sampler's copy has other weights than the learner's model, for example {odd[0]}")
    torch._foreach_copy_(list(targets.values()), [sources[name] for name in targets])  # type: ignore


@torch.no_grad()
def merged_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy's parameters under the plain model's names, with LoRA's updates (B A alpha / rank) added."""
    if not policy.lora:
        yield from policy.model.named_parameters()
        return
    base: nn.Module = policy.model.get_base_model()  # type: ignore[operator,assignment]
    for name, parameter in base.named_parameters():
        if ".lora_" in name:
            continue
        owner, _, leaf = name.rpartition(".")
        if owner.endswith(".base_layer"):
            layer_name = owner.removesuffix(".base_layer")
            layer = base.get_submodule(layer_name)
            merged = parameter + layer.get_delta_weight("default") if leaf == "weight" else parameter  # type: ignore[operator]
            yield f"{layer_name}.{leaf}", merged
        else:
            yield name, parameter


def _device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise PolicyError("model.device: 'cuda' was asked for and torch sees no CUDA device; use 'cpu' or 'auto'")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def _is_hub_name(path: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]))
    except Exception as error:
        raise PolicyError(
            f"model.path: there is no folder {name}, and the hub did not give a model of that name: {error}"
        ) from error


def _load_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    try:
        described = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        raise PolicyError(
            f"model.path: {folder / 'config.json'} is not a model that transformers knows: {error}"
        ) from error
    names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    generates = any(name.endswith(("CausalLM", "LMHeadModel", "ForConditionalGeneration")) for name in names)
    if type(described) not in MODEL_FOR_CAUSAL_LM_MAPPING or described.is_encoder_decoder or (names and not generates):
        raise PolicyError(
            f"model.path: {folder} holds {', '.join(names) or described.model_type}, which is not a causal language model"
        )
    try:
        model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)  # type: ignore
    except Exception as error:
        raise PolicyError(f"model.path: the weights in {folder} cannot be loaded: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise PolicyError(f"model.path: the weights in {folder} lack {len(missing)} tensors, for example {missing[0]}")
    return model


def _refuse_dropout(model: nn.Module, folder: Path) -> None:
    """Dropout would make the learner's log-probabilities differ from the sampler's for equal weights."""
    for name, module in model.named_modules():
        found = {key: value for key, value in vars(module).items() if "drop" in key and isinstance(value, float)}
        if isinstance(module, nn.Dropout):
            found["p"] = module.p
        for key, value in found.items():
            if value > 0:
                raise PolicyError(
                    f"model.path: {name}.{key} = {value}: dropout makes the policy that is trained another one than the "
                    f"one that is sampled; set every dropout in {folder / 'config.json'} to 0"
                )


def _context(asked: int, model: nn.Module, folder: Path) -> int:
    described: Any = model.config
    longest = getattr(described.get_text_config(), "max_position_embeddings", None)
    if not asked and longest is None:
        raise PolicyError(
            f"model.context: {folder / 'config.json'} names no max_position_embeddings; set model.context"
        )
    if asked and longest is not None and asked > longest:
        raise PolicyError(f"model.context: {asked} is beyond the model's own maximum of {longest} tokens")
    return int(asked or cast(int, longest))


def _with_lora(model: nn.Module, options: config.Lora, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise PolicyError("model.lora.rank: LoRA needs the peft package (pip install peft)") from error
    targets: Any = "all-linear" if options.targets == ["all-linear"] else options.targets
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore
        target_modules=targets,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",  # type: ignore[arg-type]
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(cast(Any, model), lora)
        except ValueError as error:
            raise PolicyError(f"model.lora.targets: {options.targets}: {error}") from error
